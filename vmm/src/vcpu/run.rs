//! Runs the guest and handles its exits, until the run is kicked or the guest ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::{KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use kvm_ioctls::{VcpuExit, VcpuFd};
use log::error;
use pvmm_devices::bus::Bus;

use crate::outcome::Outcome;

/// The device buses, shared by all vCPUs.
#[derive(Default)]
pub struct Buses {
    pub mmio: Bus,
    pub ports: Bus,
    missed: AtomicU64,
}

/// Why a run stopped.
pub enum Stop {
    /// The thread was kicked to look at its commands.
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
            // Only level-triggered interrupts need their EOI, and there are none.
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

    /// Counts accesses to addresses without a device.
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
