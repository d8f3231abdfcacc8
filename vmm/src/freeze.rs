//! Freeze: from a running machine to a template, with a pause as short as its changed pages are few.
//!
//! vCPUs and devices stand still while registers are read and each disk gets an empty layer on top. The pages
//! that the guest has changed go into a sealed file: few of them at once, many while the guest runs on, by a
//! forked process that holds them still. New memory of a machine that came from a template lies in such a file already. Writing any of it to a disk comes later.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind};
use crate::kvm::state::{self, VcpuStateV1};
use crate::memory::{Freezing, Lessons, Memory, MemoryError, Runs, WorkingSet};
use crate::snapshot::state::MachineState;
use crate::template::Template;
use crate::trace;
use crate::vcpu::thread::VcpuThread;
use crate::vm::Vm;

/// How long a guest may take to finish what it is about before it is stopped. It runs meanwhile.
const SETTLE_MAX: Duration = Duration::from_millis(20);
/// How long its vCPUs must do nothing to have finished, looked at twice.
const SLICE: Duration = Duration::from_micros(250);

/// Guest memory that stands still, or is being copied from a view that does.
enum FrozenMemory {
    /// What was moved.
    InPlace(Runs),
    Begun(Freezing),
}

/// A template whose memory may still be copied from a view that stands still. Dropping it ends the copy.
pub struct UnfinishedTemplate {
    template: Template,
    memory: FrozenMemory,
}

impl UnfinishedTemplate {
    /// Waits until all of it is there.
    pub fn finish(self) -> Result<Template, Error> {
        let Self { mut template, memory } = self;
        if let FrozenMemory::Begun(freezing) = memory {
            template.image = freezing.finish()?;
            trace::step("memory copied");
        }
        Ok(template)
    }
}

fn in_place(memory: &mut Memory) -> Result<FrozenMemory, MemoryError> {
    memory.freeze().map(FrozenMemory::InPlace)
}

impl Vm {
    /// Everything that the machine is at one instant: as soon as it has nothing to do, or 20 ms from now. It runs on as
    /// soon as it can, if it ran before. With an agent in the guest, [`crate::agent::Agent::freeze`] comes first and `thaw`
    /// after it, so that in copies nothing of the workload runs before they are refreshed.
    pub fn freeze(&mut self) -> Result<Template, Error> {
        self.begin_freeze()?.finish()
    }

    /// The same, and returns as soon as the machine runs on, if it ran before: whoever made its workload stand still can
    /// let that go on too, however long the copy takes.
    pub fn begin_freeze(&mut self) -> Result<UnfinishedTemplate, Error> {
        self.freeze_by(|memory| match memory.begin_freeze()? {
            Some(freezing) => Ok(FrozenMemory::Begun(freezing)),
            None => in_place(memory),
        })
    }

    /// The same, and the machine itself lies over what was frozen: it can go back to it.
    pub(crate) fn freeze_in_place(&mut self) -> Result<Template, Error> {
        self.freeze_by(|memory| {
            memory.go_private()?;
            in_place(memory)
        })?
        .finish()
    }

    fn freeze_by(
        &mut self,
        freeze: impl FnOnce(&mut Memory) -> Result<FrozenMemory, MemoryError>,
    ) -> Result<UnfinishedTemplate, Error> {
        if self.page_server.is_some() {
            let what = "freeze: a page server supplies the machine's memory, which is not all here";
            return Err(Error::plain(ErrorKind::InvalidConfig, what));
        }
        let was_running = self.running;
        if was_running && self.held.drives.iter().all(|drive| drive.copy.is_none()) {
            self.prepare_freeze()?;
        }
        self.memory.tidy();
        if was_running {
            settle(|| self.vcpus.iter().map(VcpuThread::cpu_time).sum());
            trace::step("settled");
        }
        let begun = Instant::now();
        self.pause()?;
        let frozen = self.freeze_paused(freeze);
        if was_running {
            self.resume()?;
        }
        let pause = begun.elapsed();
        let (mut template, memory) = frozen?;
        template.pause = pause;
        Ok(UnfinishedTemplate { template, memory })
    }

    fn freeze_paused(
        &mut self,
        freeze: impl FnOnce(&mut Memory) -> Result<FrozenMemory, MemoryError>,
    ) -> Result<(Template, FrozenMemory), Error> {
        let machine = Arc::new(self.save_state()?);
        trace::step("state saved");
        let failed = |index: usize| {
            move |error: std::io::Error| {
                Error::new(
                    ErrorKind::HostResource,
                    format!("drive {index}: cannot freeze it"),
                    error,
                )
            }
        };
        let mut drives = Vec::with_capacity(self.held.drives.len());
        for index in 0..self.held.drives.len() {
            let copy = self.take_copy(index)?;
            if let Some(drive) = self.held.drives.get(index) {
                let frozen = drive.storage.freeze(&self.held.scratch, copy);
                drives.push(frozen.map_err(failed(index))?);
            }
        }
        trace::step("disks frozen");
        let memory = freeze(&mut self.memory)?;
        trace::step("memory frozen");
        let written = match &memory {
            FrozenMemory::Begun(freezing) => &freezing.written,
            FrozenMemory::InPlace(runs) => runs,
        };
        let guess = Arc::new(WorkingSet::guess(written, self.held.working_set.as_deref()));
        let template = Template {
            // Not asked again: that would take longer than all the registers.
            host: self.kvm.host().clone(),
            machine,
            image: self.memory.image.clone(),
            drives,
            taps: self.held.taps.clone(),
            vsock_path: self.held.vsock_path.clone(),
            base: self.held.base.clone(),
            working_set: Some(guess.clone()),
            lessons: Some(Lessons::new(guess)),
            without_memory: false,
            note: Vec::new(),
            memory_sums: None,
            pause: Duration::ZERO,
        };
        Ok((template, memory))
    }

    /// Registers of vCPUs and devices. Devices before vCPUs: they may still raise an interrupt.
    pub(crate) fn save_state(&self) -> Result<MachineState, Error> {
        let save = |transport: &Arc<pvmm_devices::virtio::mmio::MmioTransport>| transport.save();
        let transports = self.transports.iter().map(save).collect::<Result<_, _>>()?;
        let asked = self.vcpus.iter().map(VcpuThread::save).collect::<Result<Vec<_>, _>>()?;
        let wait = |vcpu: crate::vcpu::thread::Answer<Box<VcpuStateV1>>| {
            let mut state = vcpu.wait()?;
            // What the guest knows, also where this host has measured a little more or less: differences do not
            // add up from host to host.
            state.tsc_khz = self.held.clock_khz.unwrap_or(state.tsc_khz);
            Ok::<_, Error>(Arc::from(state))
        };
        let vcpus = asked.into_iter().map(wait).collect::<Result<_, _>>()?;
        Ok(MachineState {
            clock: state::save_clock(self.kvm.fd())?,
            vcpus,
            ioapic: self.ioapic.save(),
            serial: self.serial.save(),
            transports,
        })
    }
}

/// Waits until the vCPUs, whose processor time `used` tells, do nothing. A guest that has just answered has connections to
/// close, processes to bury and memory to free, and what it has not done when it is stopped, every copy does again.
fn settle(mut used: impl FnMut() -> Duration) {
    let until = Instant::now() + SETTLE_MAX;
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

    #[test]
    fn guest_that_has_nothing_to_do_is_hardly_waited_for() {
        let mut looks = 0;
        settle(|| {
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
        settle(&mut used);
        assert!(begun.elapsed() >= 6 * SLICE);
        assert!(looks >= 7 || begun.elapsed() >= SETTLE_MAX);
    }

    #[test]
    fn guest_that_never_rests_is_not_waited_for_long() {
        let (begun, mut looks) = (Instant::now(), 0);
        settle(|| {
            looks += 1;
            SLICE * looks
        });
        assert!(begun.elapsed() >= SETTLE_MAX);
        assert!(SLICE * looks <= SETTLE_MAX + 2 * SLICE);
    }
}
