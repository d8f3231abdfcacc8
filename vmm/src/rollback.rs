//! Rollback: the same machine, in the same process, back at its checkpoint.
//!
//! Dirty pages are dropped, or rewritten in place if the guest writes them first; disks lose their
//! top layer; devices and vCPUs get the registers they had. Nothing is opened or made, so a machine
//! can be rolled back any number of times.

use crate::error::{Error, ErrorKind};
use crate::freeze;
use crate::kvm::state;
use crate::machine::Machine;
use crate::trace;

/// Freezes the machine and keeps the result as its checkpoint.
pub fn checkpoint(machine: &mut Machine) -> Result<(), Error> {
    for (index, drive) in machine.resources.drives.iter().enumerate() {
        if let Some(why) = drive.storage.one_way() {
            let what = format!("checkpoint: drive {index}: {why}");
            return Err(Error::plain(ErrorKind::InvalidConfig, what));
        }
    }
    machine.checkpoint = Some(freeze::freeze_in_place(machine)?);
    Ok(())
}

/// Takes the machine back to its checkpoint, as [`crate::Vm::rollback`] describes.
pub fn rollback(machine: &mut Machine) -> Result<(), Error> {
    check_drives(machine)?;
    let was_running = machine.running;
    machine.pause()?;
    if let Err(error) = rollback_paused(machine) {
        return Err(machine.break_with(&error));
    }
    if was_running {
        machine.resume()?;
    }
    Ok(())
}

/// Whether all drives can be taken back to the checkpoint, if there is one.
fn check_drives(machine: &Machine) -> Result<(), Error> {
    let Some(checkpoint) = &machine.checkpoint else {
        let what = "rollback: there is no checkpoint to go back to";
        return Err(Error::plain(ErrorKind::InvalidConfig, what));
    };
    for (index, (drive, then)) in
        machine.resources.drives.iter().zip(&checkpoint.drives).enumerate()
    {
        if let Some(why) = drive.storage.cannot_rewind(then) {
            let what = format!("rollback: drive {index} cannot be taken back: {why}");
            return Err(Error::plain(ErrorKind::InvalidConfig, what));
        }
    }
    Ok(())
}

fn rollback_paused(machine: &mut Machine) -> Result<(), Error> {
    let Some(checkpoint) = &machine.checkpoint else { return Ok(()) };
    let saved = checkpoint.state.clone();
    machine.memory.rollback(&checkpoint.image)?;
    trace::step("memory taken back");
    for (index, (drive, then)) in
        machine.resources.drives.iter().zip(&checkpoint.drives).enumerate()
    {
        drive.storage.rewind(then).map_err(|error| {
            let what = format!("drive {index}: cannot be taken back");
            Error::new(ErrorKind::HostResource, what, error)
        })?;
    }
    trace::step("disks taken back");
    state::load_clock(machine.kvm.fd(), saved.clock)?;
    machine.ioapic.restore(&saved.ioapic);
    let loads = machine.vcpus.iter().zip(&saved.vcpus);
    let loads = loads.map(|(vcpu, saved)| vcpu.load(saved.clone()));
    for load in loads.collect::<Result<Vec<_>, _>>()? {
        load.wait()?;
    }
    trace::step("vCPU state");
    for (transport, saved) in machine.transports.iter().zip(&saved.transports) {
        transport.rewind(saved)?;
    }
    trace::step("device state");
    machine.serial.restore(&saved.serial)?;
    machine.generation.renew()?;
    trace::step("serial and generation");
    machine.ending.forget();
    Ok(())
}
