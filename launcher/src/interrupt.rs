//! Ctrl-C during slow preparations, and the warning about disks in memory.

use pvmm_sandbox::Failure;
use pvmm_sandbox::scratch::{self, Place};
use pvmm_sandbox::sys::signals;

use crate::exit;
use crate::output;

/// Runs slow work that looks at `Progress::interrupted`. Returns the exit code of a caught signal,
/// if there was one, in place of its result.
pub fn interruptible<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    signals::catch_interrupts();
    or_interrupted(work())
}

/// Returns the exit code of a caught signal, if there was one, in place of `result`.
pub fn or_interrupted<T>(result: Result<T, Failure>) -> Result<T, Failure> {
    match signals::caught() {
        Some(signal) => Err(Failure::silent(exit::by_signal(signal))),
        None => result,
    }
}

/// Returns the scratch folder of VMs; warns if it is in memory.
pub fn scratch_place(quiet: bool) -> Result<Place, Failure> {
    let place = scratch::place()?;
    if place.in_memory {
        let dir = place.dir.display();
        output::remark(quiet, &format!("warning: VM disks are in this host's memory ({dir})"));
    }
    Ok(place)
}
