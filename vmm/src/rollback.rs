//! Rollback: the same machine, in the same process, back at its checkpoint.
//!
//! Memory goes back by dropping the pages that were changed, disks by emptying their top layer; devices and
//! vCPUs get the registers they had. Nothing is mapped, opened or made, so it can be done any number of times.

use crate::error::{Error, ErrorKind};
use crate::kvm::state;
use crate::trace;
use crate::vm::Vm;

impl Vm {
    /// Remembers one instant, as [`Self::freeze`] does, in place of an earlier checkpoint. The machine runs on if it ran
    /// before.
    pub fn checkpoint(&mut self) -> Result<(), Error> {
        for (index, drive) in self.held.drives.iter().enumerate() {
            if let Some(why) = drive.storage.one_way() {
                let what = format!("checkpoint: drive {index}: {why}");
                return Err(Error::plain(ErrorKind::InvalidConfig, what));
            }
        }
        self.checkpoint = Some(self.freeze_in_place()?);
        Ok(())
    }

    /// Takes the machine back to its checkpoint. It runs on from there if it ran before.
    ///
    /// A guest that has ended lives again. Connections through vsock are reset; the generation is new, so
    /// that the guest's kernel does not draw the same random numbers twice. Its programs may, and its clock
    /// is of the checkpoint's time: pause the machine first and go on with [`Self::resume_refreshed`],
    /// unless the guest has no agent.
    ///
    /// If a drive cannot be taken back, nothing is, and the machine runs on. After any later error it is neither what
    /// it was nor what it was to be: it has ended, and the error is of kind [`ErrorKind::Broken`].
    pub fn rollback(&mut self) -> Result<(), Error> {
        self.ask_drives()?;
        let was_running = self.running;
        self.pause()?;
        if let Err(error) = self.rollback_paused() {
            return Err(self.break_with(&error));
        }
        if was_running {
            self.resume()?;
            self.memory.learn();
        }
        Ok(())
    }

    /// Whether all drives can be taken back to the checkpoint, if there is one.
    fn ask_drives(&self) -> Result<(), Error> {
        let Some(checkpoint) = &self.checkpoint else {
            let what = "rollback: there is no checkpoint to go back to";
            return Err(Error::plain(ErrorKind::InvalidConfig, what));
        };
        for (index, (drive, then)) in self.held.drives.iter().zip(&checkpoint.drives).enumerate() {
            if let Some(why) = drive.storage.cannot_rewind(then) {
                let what = format!("rollback: drive {index} cannot be taken back: {why}");
                return Err(Error::plain(ErrorKind::InvalidConfig, what));
            }
        }
        Ok(())
    }

    fn rollback_paused(&mut self) -> Result<(), Error> {
        let Some(checkpoint) = &self.checkpoint else { return Ok(()) };
        let saved = checkpoint.machine.clone();
        self.memory.rewind(&checkpoint.image)?;
        trace::step("memory taken back");
        for (index, (drive, then)) in self.held.drives.iter().zip(&checkpoint.drives).enumerate() {
            drive.storage.rewind(then).map_err(|error| {
                let what = format!("drive {index}: cannot be taken back");
                Error::new(ErrorKind::HostResource, what, error)
            })?;
        }
        trace::step("disks taken back");
        state::load_clock(self.kvm.fd(), saved.clock)?;
        self.ioapic.restore(&saved.ioapic);
        let loads = self.vcpus.iter().zip(&saved.vcpus);
        let loads = loads.map(|(vcpu, saved)| vcpu.load(saved.clone()));
        for load in loads.collect::<Result<Vec<_>, _>>()? {
            load.wait()?;
        }
        trace::step("vCPU state");
        for (transport, saved) in self.transports.iter().zip(&saved.transports) {
            transport.rewind(saved)?;
        }
        trace::step("device state");
        self.serial.restore(&saved.serial)?;
        self.generation.renew()?;
        trace::step("serial and generation");
        self.ending.forget();
        Ok(())
    }
}
