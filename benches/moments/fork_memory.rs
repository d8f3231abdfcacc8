//! Fork memory: what one more VM of a template costs in memory, after its first command and some
//! seconds of idling.

use std::ops::Range;
use std::thread;
use std::time::{Duration, Instant};

use pvmm::next_trim;

use crate::board::{Board, Outcome, Unit};
use crate::guest::tap;
use crate::moments::processes;
use crate::peers::pvmm::{Job, live, start};
use crate::stage::{Baking, Stage};

const REST: Duration = Duration::from_secs(12);
const PRIVATE: &str = "idle fork: private dirty";
const TABLES: &str = "idle fork: page tables";
const HOST: &str = "idle fork: host's memory";
const SLAB: &str = "idle fork: slab";

pub fn run(stage: &Stage, baking: &Baking, board: &mut Board) -> Outcome<()> {
    let count = board.counts.children;
    board.say(&format!("memory of {count} idle forks"));
    let own_process = |index| {
        let socket = stage.dir()?.join("v");
        let (snapshot, tap) = (baking.snapshot.clone(), tap(index + 1));
        let (process, ..) = start(&stage.pvmm.program, &Job::Restore { snapshot, socket, tap })?;
        Ok((process.pid(), process))
    };
    // The host's slabs grow once for the first VMs. These VMs are dropped, so that no contender is
    // charged for that growth.
    drop((0..count).map(own_process).collect::<Outcome<Vec<_>>>()?);
    measure(board, "pvmm, a process each", count, own_process)?;

    let own = std::process::id();
    // The caller's end of the agent's connection is dropped, because the other contenders have it
    // in another process.
    let live = |index| {
        let (vm, _agent) =
            live(&baking.template, stage.dir()?.join("v"), tap(index + 1).as_deref())?;
        Ok(vm)
    };
    let rested = |indices: Range<usize>| {
        let mut machines = indices.map(live).collect::<Outcome<Vec<_>>>()?;
        let made = Instant::now();
        let mut at = next_trim(Duration::ZERO);
        while at < REST {
            thread::sleep(at.saturating_sub(made.elapsed()));
            machines.iter_mut().try_for_each(|vm| vm.trim().map(drop))?;
            at = next_trim(at);
        }
        thread::sleep(REST.saturating_sub(made.elapsed()));
        Outcome::Ok(machines)
    };
    // Two VMs pay first for what all VMs share: a page of the template that only one VM has mapped
    // counts as private. The first trim also returns what this process has kept until here.
    let first = rested(count..count + 2)?;
    let before = (processes::private_mib(own)?, processes::host_mib()?);
    let machines = rested(0..count)?;
    let after = (processes::private_mib(own)?, processes::host_mib()?);
    let each = |before: f64, after: f64| (after - before) / count as f64;
    let name = "pvmm, in one process";
    board.add(PRIVATE, name, Unit::Mib, each(before.0.0, after.0.0))?;
    board.add(TABLES, name, Unit::Mib, each(before.0.1, after.0.1))?;
    board.add(HOST, name, Unit::Mib, each(after.1.0, before.1.0))?;
    board.add(SLAB, name, Unit::Mib, each(before.1.1, after.1.1))?;
    drop((machines, first));

    if let (Some(peer), Some(baked)) = (&stage.firecracker, &baking.firecracker) {
        measure(board, "firecracker", count, |index| {
            let machine = peer.restore(baked, &stage.dir()?, tap(index + 1).as_deref())?;
            Ok((machine.process.pid(), machine))
        })?;
    }
    Ok(())
}

/// Makes `count` VMs with `make`, each in a process of its own. Adds the memory of each process,
/// and the memory of the host for each VM.
fn measure<T>(
    board: &mut Board,
    name: &str,
    count: usize,
    make: impl Fn(usize) -> Outcome<(u32, T)>,
) -> Outcome<()> {
    // The first VM pays for what later VMs share.
    let first = make(count)?;
    thread::sleep(REST);
    let before = processes::host_mib()?;
    let made = (0..count).map(make).collect::<Outcome<Vec<_>>>()?;
    thread::sleep(REST);
    let after = processes::host_mib()?;
    for (pid, _) in &made {
        let (private, tables) = processes::private_mib(*pid)?;
        board.add(PRIVATE, name, Unit::Mib, private)?;
        board.add(TABLES, name, Unit::Mib, tables)?;
    }
    board.add(HOST, name, Unit::Mib, (before.0 - after.0) / count as f64)?;
    board.add(SLAB, name, Unit::Mib, (after.1 - before.1) / count as f64)?;
    drop(first);
    Ok(())
}
