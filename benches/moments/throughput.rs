//! Throughput: a vsock stream, TCP over a tap, a disk read and written in order and at random.
//!
//! One script in the guest measures everything by the guest's clock. This process is the other end
//! of its streams.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Command;
use std::thread;

use pvmm::exec::ExecRequest;

use crate::board::{Board, Outcome, Unit};
use crate::guest::{PATIENCE, deadline};
use crate::peers::Machine;
use crate::stage::Stage;

const SCRIPT: &str = include_str!("throughput.py");
/// The maximum number of rounds after the warm-up. A round moves all data through every contender,
/// which takes a minute on an emulated processor.
const MAX_ROUNDS: usize = 7;
const VSOCK_PORT: u32 = 5005;
const TCP_PORT: u16 = 5006;
const MOMENTS: [&str; 8] = [
    "block: sequential write",
    "block: sequential read",
    "block: random 4K write",
    "block: random 4K read",
    "vsock: guest to host",
    "vsock: host to guest",
    "TCP over tap: guest to host",
    "TCP over tap: host to guest",
];

pub fn run(stage: &Stage, board: &mut Board) -> Outcome<()> {
    let mut machines = Vec::new();
    for (index, peer) in stage.peers().into_iter().enumerate() {
        board.say(&format!("throughput: booting {}", peer.name()));
        let mut spec = stage.spec(index + 1)?;
        let disk = spec.dir.join("disk");
        File::create(&disk)?.set_len((board.counts.stream_mib as u64) << 20)?;
        spec.disk = Some(disk);
        let mut gateway = String::new();
        if let Some(tap) = &spec.tap {
            gateway = format!("10.77.{index}.1");
            spec.cmdline += &format!(" ip=10.77.{index}.2::{gateway}:255.255.255.0::eth0:off");
            let address = format!("{gateway}/24");
            Command::new("ip").args(["addr", "replace", &address, "dev", tap]).output()?;
        }
        machines.push((peer.name(), peer.boot(&spec)?.0, gateway));
    }
    for round in 0..board.counts.slow.min(MAX_ROUNDS) + 1 {
        for index in board.order(machines.len()) {
            let (name, machine, gateway) = &machines[index];
            board.say(&format!("throughput: {name}"));
            let rates = measure(machine, gateway, board.counts.stream_mib)
                .map_err(|e| format!("throughput, {name}: {e}"))?;
            let known = MOMENTS.into_iter().filter_map(|what| Some((what, *rates.get(what)?)));
            for (what, rate) in known.filter(|_| round > 0) {
                board.add(what, name, Unit::Rate, rate)?;
            }
        }
    }
    Ok(())
}

fn measure(machine: &Machine, gateway: &str, mib: usize) -> Outcome<BTreeMap<String, f64>> {
    let ear = machine.way.listen(VSOCK_PORT)?;
    let tcp = match gateway {
        "" => None,
        _ => Some(TcpListener::bind((gateway, TCP_PORT))?),
    };
    thread::scope(|scope| {
        let served = scope.spawn(move || -> Outcome<()> {
            serve(ear.accept(deadline())?, mib)?;
            match tcp {
                Some(tcp) => serve(tcp.accept()?.0, mib),
                None => Ok(()),
            }
        });
        let request = ExecRequest::argv(["python3", "-c", SCRIPT, &mib.to_string(), gateway]);
        let output = machine.agent.exec(&request.timeout(PATIENCE))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr.bytes).into());
        }
        served.join().map_err(|_| "the host's end panicked")??;
        Ok(serde_json::from_slice(&output.stdout.bytes)?)
    })
}

/// Serves the host's end of one stream: reads `mib` MiB, acknowledges them with a byte, waits for a
/// byte, writes `mib` MiB, and waits for a byte. Fails if the guest ends the stream early.
fn serve(mut stream: impl Read + Write, mib: usize) -> Outcome<()> {
    let mut buffer = vec![0x5a; 1 << 20];
    let mut left = mib << 20;
    while left > 0 {
        match stream.read(&mut buffer)? {
            0 => return Err("the guest ended the stream".into()),
            count => left -= count.min(left),
        }
    }
    stream.write_all(b"k")?;
    stream.read_exact(&mut [0])?;
    for _ in 0..mib {
        stream.write_all(&buffer)?;
    }
    stream.read_exact(&mut [0])?;
    Ok(())
}
