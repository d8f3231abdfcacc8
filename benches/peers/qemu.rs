//! QEMU's `microvm` machine, the peer that every distribution has. Its vsock is the host kernel's.

use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pvmm::agent::Agent;

use super::{Machine, Peer, Process, Way};
use crate::board::{Outcome, millis};
use crate::guest::{MEMORY_MIB, Spec, deadline, exec_true};
use crate::sys;

const PROGRAM: &str = "qemu-system-x86_64";
/// The port that the agent serves, and the port that the agent connects to when it is ready.
const AGENT_PORT: u32 = 1024;
const READY_PORT: u32 = 1025;
/// The time between two checks that the process still runs.
const LOOK: Duration = Duration::from_secs(1);

pub struct Qemu {
    cid: AtomicU32,
}

impl Qemu {
    /// Returns QEMU with its version, or `None` if QEMU or `/dev/vhost-vsock` is missing.
    pub fn find() -> Option<(Self, String)> {
        let output = Command::new(PROGRAM).arg("--version").output().ok()?;
        let version = String::from_utf8_lossy(&output.stdout).lines().next()?.to_owned();
        std::path::Path::new("/dev/vhost-vsock")
            .exists()
            .then(|| (Self { cid: AtomicU32::new(100) }, version))
    }

    fn command(&self, spec: &Spec, cid: u32) -> Command {
        let mut qemu = Command::new(PROGRAM);
        let machine = "microvm,accel=kvm,pic=off,pit=off,rtc=off,isa-serial=off,x-option-roms=off";
        let drive = |path: &std::path::Path, id: &str, more: &str| {
            // The image is not locked, because the other contenders have it open too.
            let words = format!("id={id},if=none,format=raw,file.locking=off,{more}file=");
            let mut option = OsString::from(words);
            option.push(path);
            option
        };
        qemu.args(["-M", machine, "-cpu", "host", "-smp", "1", "-m", &MEMORY_MIB.to_string()]);
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        qemu.arg("-kernel").arg(&spec.guest.kernel).arg("-initrd").arg(&spec.guest.initrd);
        qemu.args(["-append", &spec.cmdline]);
        qemu.arg("-drive").arg(drive(&spec.guest.rootfs, "root", "readonly=on,"));
        qemu.args(["-device", "virtio-blk-device,drive=root"]);
        if let Some(disk) = &spec.disk {
            qemu.arg("-drive").arg(drive(disk, "disk", ""));
            qemu.args(["-device", "virtio-blk-device,drive=disk"]);
        }
        if let Some(tap) = &spec.tap {
            let card = format!("tap,id=net,ifname={tap},script=no,downscript=no,vhost=off");
            qemu.args(["-netdev", &card, "-device", "virtio-net-device,netdev=net"]);
        }
        qemu.args(["-device", &format!("vhost-vsock-device,guest-cid={cid}")]);
        qemu.args(["-device", "virtio-rng-device"]);
        qemu
    }
}

impl Peer for Qemu {
    fn name(&self) -> &'static str {
        "qemu microvm"
    }

    fn boot(&self, spec: &Spec) -> Outcome<(Machine, f64)> {
        // Each VM has a new address, because the kernel is slow to release an old one.
        let cid = self.cid.fetch_add(1, Ordering::Relaxed);
        let ready = Way::Kernel.listen(READY_PORT)?;
        let mut command = self.command(spec, cid);
        let log = std::fs::File::create(spec.dir.join("qemu.log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let begun = Instant::now();
        let mut process = Process(command.spawn()?);
        let until = deadline();
        while ready.accept(Instant::now() + LOOK).is_err() {
            let ended = process.0.try_wait()?;
            if ended.is_some() || Instant::now() > until {
                let log = std::fs::read_to_string(spec.dir.join("qemu.log")).unwrap_or_default();
                return Err(format!("the guest was never ready; {ended:?}; {log}").into());
            }
        }
        let socket = sys::vsock_connect(cid, AGENT_PORT)?;
        let agent = Agent::over(UnixStream::from(socket))?;
        exec_true(&agent)?;
        let took = millis(begun.elapsed());
        Ok((Machine { process, agent, way: Way::Kernel }, took))
    }
}
