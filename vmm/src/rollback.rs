//! Rollback: the same machine, in the same process, back at a checkpoint, on whatever branch of its
//! history that lies.
//!
//! Dirty pages are dropped, or rewritten in place if the guest writes them first; disks lose their
//! top layer; devices and vCPUs get the registers they had. Nothing is opened or made, so a machine
//! can be rolled back any number of times.

use crate::error::{Error, ErrorKind};
use crate::freeze;
use crate::frozen::Frozen;
use crate::kvm::state;
use crate::machine::Machine;
use crate::trace;

/// Freezes the machine so that it can come back to this instant with [`checkout`].
pub fn take_checkpoint(machine: &mut Machine) -> Result<Frozen, Error> {
    for (index, drive) in machine.resources.drives.iter().enumerate() {
        if let Some(why) = drive.storage.one_way() {
            let what = format!("checkpoint: drive {index}: {why}");
            return Err(Error::plain(ErrorKind::InvalidConfig, what));
        }
    }
    freeze::freeze_in_place(machine)
}

/// Takes the machine back to the checkpoint that it keeps, as [`crate::Vm::rollback`] describes.
pub fn rollback(machine: &mut Machine) -> Result<(), Error> {
    let Some(checkpoint) = machine.checkpoint.take() else {
        let what = "rollback: there is no checkpoint to go back to";
        return Err(Error::plain(ErrorKind::InvalidConfig, what));
    };
    let done = checkout(machine, &checkpoint);
    machine.checkpoint = Some(checkpoint);
    done
}

/// Takes the machine to a checkpoint of its own, as [`crate::Vm::checkout`] describes.
pub fn checkout(machine: &mut Machine, to: &Frozen) -> Result<(), Error> {
    check(machine, to)?;
    let was_running = machine.running;
    machine.pause()?;
    if let Err(error) = checkout_paused(machine, to) {
        return Err(machine.break_with(&error));
    }
    if was_running {
        machine.resume()?;
    }
    Ok(())
}

/// Whether the machine can be taken to `to`: its memory and devices are as many as then, and all
/// its drives can be taken back.
fn check(machine: &Machine, to: &Frozen) -> Result<(), Error> {
    let refuse = |what: String| Err(Error::plain(ErrorKind::InvalidConfig, what));
    let same = machine.memory.image.regions() == to.image.regions()
        && machine.vcpus.len() == to.state.vcpus.len()
        && machine.transports.len() == to.state.transports.len()
        && machine.resources.drives.len() == to.drives.len();
    if !same || to.without_memory || machine.page_server.is_some() {
        return refuse("rollback: that is no checkpoint of this machine".to_owned());
    }
    for (index, (drive, then)) in machine.resources.drives.iter().zip(&to.drives).enumerate() {
        if let Some(why) = drive.storage.cannot_rewind(then) {
            return refuse(format!("rollback: drive {index} cannot be taken back: {why}"));
        }
    }
    Ok(())
}

fn checkout_paused(machine: &mut Machine, to: &Frozen) -> Result<(), Error> {
    let saved = to.state.clone();
    machine.memory.rollback(&to.image)?;
    trace::step("memory taken back");
    for (index, (drive, then)) in machine.resources.drives.iter().zip(&to.drives).enumerate() {
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
