//! `pvmm kill` and `pvmm rm`: ending VMs, and removing what is left of them.
//!
//! Both look at the lock, not at a process number from a file, to know whether a VM is alive.

use std::io;
use std::time::Duration;

use crate::args;
use crate::attach;
use crate::cli::{Kill, KillSignal, Rm};
use crate::exit::{Failure, Outcome};
use crate::output;
use crate::sys::process::Other;
use crate::vm_dir::{Base, Entry};

/// Longer than the VMM process gives its guest to shut down.
const TERM_PATIENCE: Duration = Duration::from_secs(15);
/// A killed process is gone at once, unless the kernel is stuck.
const KILL_PATIENCE: Duration = Duration::from_secs(10);

pub fn kill(args: Kill) -> Outcome {
    let (commands, vms): (Vec<String>, _) =
        args.vms.into_iter().partition(|name| name.contains(':'));
    for name in &commands {
        end_command(name, args.signal)?;
        output::line(name)?;
    }
    for_each(&vms, |base, vm| {
        if vm.state.is_alive() {
            end(vm, args.signal == KillSignal::Kill)?;
        }
        Ok(base.discard(vm)?)
    })
}

pub fn rm(args: Rm) -> Outcome {
    for_each(&args.vms, |base, vm| {
        if vm.state.is_alive() {
            if !args.force {
                let message = format!("'{}' is {}", vm.label(), vm.state.word());
                let hint = format!("end it with 'pvmm kill {0}' or 'pvmm rm -f {0}'", vm.label());
                return Err(Failure::usage(message).hint(hint));
            }
            end(vm, true)?;
        }
        Ok(base.discard(vm)?)
    })
}

/// Ends a command that `pvmm exec -d` started, with all that it started.
fn end_command(name: &str, signal: KillSignal) -> Result<(), Failure> {
    let name = args::process(name).map_err(|why| Failure::usage(format!("'{name}': {why}")))?;
    let vm = Base::open()?.find(&name.vm)?;
    vm.require_running()?;
    let agent = attach::connect(&vm.dir, KILL_PATIENCE).map_err(attach::refuse_agent)?;
    let signal = match signal {
        KillSignal::Term => libc::SIGTERM,
        KillSignal::Kill => libc::SIGKILL,
    };
    agent
        .signal_process(name.id, signal, true)
        .map_err(|error| super::attach::refuse(error, &name.vm))
}

/// Goes through all of them even if one fails, and prints each that is gone.
fn for_each(names: &[String], each: impl Fn(&Base, &Entry) -> Result<(), Failure>) -> Outcome {
    let base = Base::open()?;
    let mut failed = None;
    for name in names {
        let done = base.find(name).map_err(Failure::from).and_then(|vm| each(&base, &vm));
        match done {
            Ok(()) => output::line(name)?,
            Err(failure) => {
                if let Some(earlier) = failed.replace(failure) {
                    crate::exit::report(&earlier);
                }
            }
        }
    }
    match failed {
        Some(failure) => Err(failure),
        None => Ok(0),
    }
}

/// Ends the VMM process, gently first unless told otherwise.
fn end(vm: &Entry, at_once: bool) -> Result<(), Failure> {
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
    // Asked after opening: while the lock is held the number means the process we think.
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

fn wait(vm: &Entry, patience: Duration) -> Result<(), Failure> {
    match vm.dir.wait_for_end(patience)? {
        true => Ok(()),
        false => Err(Failure::fault(format!("'{}' was killed but does not end", vm.label()))),
    }
}
