//! `pvmm kill` and `pvmm rm`: end VMs, and remove what is left of them.
//!
//! Whether a VM is alive is decided by its lock, not by a process id from a file.

use std::time::Duration;

use crate::args;
use crate::cli::{Kill, KillSignal, Rm};
use crate::exit::{Failure, Outcome};
use crate::output;
use pvmm_sandbox::end::end;
use pvmm_sandbox::guest_agent;
use pvmm_sandbox::hibernated;
use pvmm_sandbox::vm_dir::{Base, VmDirError, VmEntry};

/// How long the agent may take to answer.
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
    let base = Base::open()?;
    let is_vm = |name: &String| !matches!(base.find(name), Err(VmDirError::Unknown(_)));
    let (vms, others): (Vec<String>, Vec<String>) = args.vms.into_iter().partition(is_vm);
    for name in &others {
        match hibernated::find(name) {
            Ok(asleep) => asleep.remove()?,
            Err(_) => return Err(VmDirError::Unknown(name.clone()).into()),
        }
        output::line(name)?;
    }
    for_each(&vms, |base, vm| {
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

/// Ends a command that `pvmm exec -d` started, with all its child processes.
fn end_command(name: &str, signal: KillSignal) -> Result<(), Failure> {
    let name = args::process(name).map_err(|why| Failure::usage(format!("'{name}': {why}")))?;
    let vm = Base::open()?.find(&name.vm)?;
    vm.require_running()?;
    let agent = guest_agent::connect(&vm.dir, KILL_PATIENCE).map_err(guest_agent::refuse)?;
    let signal = match signal {
        KillSignal::Term => libc::SIGTERM,
        KillSignal::Kill => libc::SIGKILL,
    };
    agent
        .signal_process(name.id, signal, true)
        .map_err(|error| super::attach::refuse(error, &name.vm))
}

/// Applies `each` to every VM even if one fails, and prints the names of those that succeeded.
fn for_each(names: &[String], each: impl Fn(&Base, &VmEntry) -> Result<(), Failure>) -> Outcome {
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
