//! Runs the guest and answers its exits, until something ends the run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::{KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::{VcpuExit, VcpuFd};
use log::error;
use pvmm_devices::bus::Bus;

/// How a machine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest switched itself off.
    Poweroff,
    /// The guest asked for a reset.
    Reboot,
    /// A fault that no handler took: a kernel that crashed beyond its own help, or never was one.
    TripleFault,
    /// KVM could not go on with the guest.
    InternalError { suberror: u32 },
    /// The processor refused the guest's state.
    EntryFailed { reason: u64 },
    /// The process that supplied the guest's memory is gone.
    MemoryLost,
    /// The host failed in the middle of a change of the whole machine, such as a rollback.
    Broken { why: String },
    /// KVM gave up on the vCPU for a reason that this machine never asks for.
    UnexpectedExit { exit: String },
}

/// The devices that a vCPU reaches, shared by all of them.
#[derive(Default)]
pub struct Buses {
    pub mmio: Bus,
    pub ports: Bus,
    missed: AtomicU64,
}

/// Why a run stopped.
pub enum Stop {
    /// Somebody wants the thread's attention.
    Kicked,
    Ended(Outcome),
}

/// Runs the guest until it is kicked or ends.
pub fn run(vcpu: &mut VcpuFd, buses: &Arc<Buses>) -> Stop {
    loop {
        let outcome = match vcpu.run() {
            Ok(VcpuExit::MmioRead(address, data)) => {
                buses.count(buses.mmio.read(address, data));
                continue;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                buses.count(buses.mmio.write(address, data));
                continue;
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                buses.count(buses.ports.read(port.into(), data));
                continue;
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                buses.count(buses.ports.write(port.into(), data));
                continue;
            }
            // Only level interrupts need to hear of their end, and there are none.
            Ok(VcpuExit::IoapicEoi(_)) => continue,
            Ok(VcpuExit::Intr) => return Stop::Kicked,
            Ok(VcpuExit::Shutdown) => Outcome::TripleFault,
            Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _)) => Outcome::Poweroff,
            Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _)) => Outcome::Reboot,
            Ok(VcpuExit::FailEntry(reason, _)) => Outcome::EntryFailed { reason },
            Ok(VcpuExit::InternalError) => Outcome::InternalError { suberror: suberror(vcpu) },
            Ok(exit) => Outcome::UnexpectedExit { exit: format!("{exit:?}") },
            Err(error) => match error.errno() {
                libc::EINTR | libc::EAGAIN => return Stop::Kicked,
                errno => Outcome::UnexpectedExit { exit: format!("KVM_RUN failed, errno {errno}") },
            },
        };
        if matches!(outcome, Outcome::InternalError { .. } | Outcome::UnexpectedExit { .. }) {
            error!("the guest stopped at {:#x}: {outcome:?}", rip(vcpu));
        }
        return Stop::Ended(outcome);
    }
}

impl Buses {
    pub fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }

    /// Counts accesses to addresses where nothing is.
    fn count(&self, found: bool) {
        if !found {
            self.missed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn suberror(vcpu: &mut VcpuFd) -> u32 {
    let raw = &vcpu.get_kvm_run().__bindgen_anon_1;
    crate::sys::internal_suberror(raw)
}

fn rip(vcpu: &VcpuFd) -> u64 {
    vcpu.get_regs().map_or(0, |regs| regs.rip)
}
