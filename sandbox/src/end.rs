//! Ends the monitor process of a VM.
//!
//! Whether a VM is alive is decided by its lock, not by a process id from a file.

use std::io;
use std::time::Duration;

use crate::failure::Failure;
use crate::sys::process::Other;
use crate::vm_dir::VmEntry;

/// How long a VM may take to end; longer than the monitor process gives its guest to shut down.
const TERM_PATIENCE: Duration = Duration::from_secs(15);
/// How long a killed process may take to end; only a stuck kernel needs more.
const KILL_PATIENCE: Duration = Duration::from_secs(10);

/// Ends the monitor process: with SIGTERM first, unless `at_once`.
pub fn end(vm: &VmEntry, at_once: bool) -> Result<(), Failure> {
    let unreachable = |error: io::Error| {
        Failure::fault(format!("cannot signal the process of '{}': {error}", vm.label()))
    };
    let pid = vm.record.pid.ok_or_else(|| {
        Failure::fault(format!("'{}' is only just starting", vm.label())).hint("try again")
    })?;
    let process = match Other::open(pid) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return wait(vm, KILL_PATIENCE),
        process => process.map_err(unreachable)?,
    };
    // Checked after opening the process: while the lock is held, its id belongs to the monitor
    // process.
    if !vm.dir.is_alive() {
        return Ok(());
    }
    let send = |signal| match process.signal(signal) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        sent => sent.map_err(unreachable),
    };
    if !at_once {
        send(libc::SIGTERM)?;
        if vm.dir.wait_for_end(TERM_PATIENCE)? {
            return Ok(());
        }
    }
    send(libc::SIGKILL)?;
    wait(vm, KILL_PATIENCE)
}

fn wait(vm: &VmEntry, patience: Duration) -> Result<(), Failure> {
    if vm.dir.wait_for_end(patience)? {
        Ok(())
    } else {
        Err(Failure::fault(format!("'{}' was killed but does not end", vm.label())))
    }
}
