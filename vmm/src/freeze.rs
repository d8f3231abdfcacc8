//! Freeze: from a running machine to a template, with a pause as short as its changed pages are
//! few.
//!
//! vCPUs and devices stand still while registers are read and each disk gets an empty layer on top.
//! The pages that the guest has changed go into a sealed file: few of them at once, many while the
//! guest runs on, by a forked process that holds them still. Writing any of it to a disk comes
//! later.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::ablation::Mechanism;
use crate::error::{Error, ErrorKind};
use crate::frozen::Frozen;
use crate::kvm::state::{self, VcpuStateV1};
use crate::machine::{Machine, drives};
use crate::memory::{Freezing, Memory, MemoryError, MemoryImage, PageRanges, WorkingSet};
use crate::state::MachineState;
use crate::trace;
use crate::vcpu::thread::VcpuThread;

/// How long its vCPUs must do nothing to have finished, looked at twice.
const SLICE: Duration = Duration::from_micros(250);

/// Guest memory that stands still, or is being copied from a view that does.
enum FrozenMemory {
    /// The dirty pages were copied during the pause.
    InPlace(PageRanges),
    Begun(Freezing),
}

/// A template whose memory may still be copied from a view that stands still. Dropping it ends the
/// copy.
pub struct Unfinished {
    frozen: Frozen,
    memory: FrozenMemory,
}

impl Unfinished {
    /// Waits until all of it is there.
    pub fn finish(self) -> Result<Frozen, Error> {
        let Self { mut frozen, memory } = self;
        if let FrozenMemory::Begun(freezing) = memory {
            frozen.image = freezing.finish()?;
            trace::step("memory copied");
        }
        Ok(frozen)
    }
}

fn in_place(memory: &mut Memory) -> Result<FrozenMemory, MemoryError> {
    memory.freeze().map(FrozenMemory::InPlace)
}

/// Freezes the machine. Returns as soon as it runs on, if it ran before; the memory may still be
/// copied then.
pub fn begin_freeze(machine: &mut Machine) -> Result<Unfinished, Error> {
    let filters = machine.resources.thread_filters.clone();
    let copier = filters.as_ref().map(|all| &all.copier);
    freeze_by(machine, |memory| match memory.begin_freeze(copier)? {
        Some(freezing) => Ok(FrozenMemory::Begun(freezing)),
        None => in_place(memory),
    })
}

/// Freezes the machine for a checkpoint: its own memory is mapped over the new image afterwards, so
/// that it can be rolled back.
pub fn freeze_in_place(machine: &mut Machine) -> Result<Frozen, Error> {
    freeze_by(machine, in_place)?.finish()
}

/// Freezes the machine's disks alone, for a template without memory. The machine stands still only
/// while each disk gets an empty layer on top.
pub fn freeze_disks(machine: &mut Machine) -> Result<Frozen, Error> {
    let nothing = |_: &mut Memory| Ok(FrozenMemory::InPlace(PageRanges::default()));
    let mut frozen = freeze_by(machine, nothing)?.finish()?;
    frozen.image = MemoryImage::empty(frozen.image.regions().to_vec());
    (frozen.base, frozen.working_set, frozen.without_memory) = (None, None, true);
    Ok(frozen)
}

fn freeze_by(
    machine: &mut Machine,
    freeze: impl FnOnce(&mut Memory) -> Result<FrozenMemory, MemoryError>,
) -> Result<Unfinished, Error> {
    if machine.page_server.is_some() {
        let what = "freeze: a page server supplies the machine's memory, which is not all here";
        return Err(Error::plain(ErrorKind::InvalidConfig, what));
    }
    let was_running = machine.running;
    if was_running && machine.resources.drives.iter().all(|drive| drive.copy.is_none()) {
        drives::prepare_copies(machine)?;
    }
    let begun = Instant::now();
    machine.pause()?;
    let frozen = freeze_paused(machine, freeze);
    if was_running {
        machine.resume()?;
    }
    let pause = begun.elapsed();
    let (mut frozen, memory) = frozen?;
    frozen.pause = pause;
    Ok(Unfinished { frozen, memory })
}

fn freeze_paused(
    machine: &mut Machine,
    freeze: impl FnOnce(&mut Memory) -> Result<FrozenMemory, MemoryError>,
) -> Result<(Frozen, FrozenMemory), Error> {
    let state = Arc::new(save_state(machine)?);
    trace::step("state saved");
    let failed = |index: usize| {
        move |error: std::io::Error| {
            Error::new(ErrorKind::HostResource, format!("drive {index}: cannot freeze it"), error)
        }
    };
    let mut drives = Vec::with_capacity(machine.resources.drives.len());
    for index in 0..machine.resources.drives.len() {
        let copy = drives::take_copy(machine, index)?;
        if let Some(drive) = machine.resources.drives.get(index) {
            let frozen = drive.storage.freeze(&machine.resources.scratch, copy);
            drives.push(frozen.map_err(failed(index))?);
        }
    }
    trace::step("disks frozen");
    let memory = freeze(&mut machine.memory)?;
    trace::step("memory frozen");
    let written = match &memory {
        FrozenMemory::Begun(freezing) => &freezing.written,
        FrozenMemory::InPlace(runs) => runs,
    };
    let guess = WorkingSet::guess(written, machine.resources.working_set.as_deref());
    let frozen = Frozen {
        // Not asked again: that would take longer than all the registers.
        host: machine.kvm.host().clone(),
        state,
        image: machine.memory.image.clone(),
        drives,
        taps: machine.resources.taps.clone(),
        vsock_path: machine.resources.vsock_path.clone(),
        base: machine.resources.base.clone(),
        working_set: Some(Arc::new(guess)),
        without_memory: false,
        note: Vec::new(),
        memory_sums: None,
        pause: Duration::ZERO,
    };
    Ok((frozen, memory))
}

/// Registers of vCPUs and devices. Devices before vCPUs: they may still raise an interrupt.
pub fn save_state(machine: &Machine) -> Result<MachineState, Error> {
    let save = |transport: &Arc<pvmm_devices::virtio::mmio::MmioTransport>| transport.save();
    let transports = machine.transports.iter().map(save).collect::<Result<_, _>>()?;
    let asked = machine.vcpus.iter().map(VcpuThread::save).collect::<Result<Vec<_>, _>>()?;
    let wait = |vcpu: crate::vcpu::thread::Answer<Box<VcpuStateV1>>| {
        let mut state = vcpu.wait()?;
        // What the guest knows, also where this host has measured a little more or less:
        // differences do not add up from host to host.
        state.tsc_khz = machine.resources.clock_khz.unwrap_or(state.tsc_khz);
        state.limit_to(&machine.resources.cpu);
        Ok::<_, Error>(Arc::from(state))
    };
    let vcpus = asked.into_iter().map(wait).collect::<Result<_, _>>()?;
    Ok(MachineState {
        cpu: machine.resources.cpu.clone(),
        clock: state::save_clock(machine.kvm.fd())?,
        vcpus,
        ioapic: machine.ioapic.save(),
        serial: machine.serial.save(),
        transports,
    })
}

/// Waits until the vCPUs are idle, at most for `max`; the guest runs meanwhile. A guest that has
/// just answered still closes connections, reaps processes and frees memory, and every fork would
/// do again what it has not done when it is frozen.
pub fn settle(machine: &Machine, max: Duration) {
    if machine.running && Mechanism::Settle.in_use() {
        settle_by(max, || machine.vcpus.iter().map(VcpuThread::cpu_time).sum());
        trace::step("settled");
    }
}

/// Waits until the processor time that `used` returns hardly grows.
fn settle_by(max: Duration, mut used: impl FnMut() -> Duration) {
    let until = Instant::now() + max;
    let (mut before, mut quiet) = (used(), 0);
    while quiet < 2 && Instant::now() < until {
        thread::sleep(SLICE);
        let now = used();
        quiet = if now.saturating_sub(before) < SLICE / 4 { quiet + 1 } else { 0 };
        before = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_millis(20);

    #[test]
    fn guest_that_has_nothing_to_do_is_hardly_waited_for() {
        let mut looks = 0;
        settle_by(MAX, || {
            looks += 1;
            Duration::from_secs(7)
        });
        assert!(looks <= 3);
    }

    #[test]
    fn guest_is_waited_for_until_it_has_done_its_work() {
        let (begun, mut looks) = (Instant::now(), 0);
        let mut used = || {
            looks += 1;
            SLICE * looks.min(5)
        };
        settle_by(MAX, &mut used);
        assert!(begun.elapsed() >= 6 * SLICE);
        assert!(looks >= 7 || begun.elapsed() >= MAX);
    }

    #[test]
    fn guest_that_never_rests_is_not_waited_for_long() {
        let (begun, mut looks) = (Instant::now(), 0);
        settle_by(MAX, || {
            looks += 1;
            SLICE * looks
        });
        assert!(begun.elapsed() >= MAX);
        assert!(SLICE * looks <= MAX + 2 * SLICE);
    }
}
