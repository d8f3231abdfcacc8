//! `pvmm exec`: runs a command in a running VM.
//!
//! Any number of commands may run at once; each has its own connection to the agent.

use pvmm::exec::{ExecError, Limits};

use crate::attach::{self, Names};
use crate::cli::Exec;
use crate::exit::{self, Outcome};
use crate::guest_agent;
use crate::output;
use crate::sys::signals::Signals;
use crate::vm_dir::Base;

pub fn exec(args: Exec) -> Outcome {
    if !args.detach {
        attach::require_terminal(&args.command)?;
    }
    let vm = Base::open()?.find(&args.vm)?;
    vm.require_running()?;
    let signals = Signals::hold(args.command.signals())?;
    let agent =
        guest_agent::connect(&vm.dir, guest_agent::PATIENCE).map_err(guest_agent::refuse)?;
    let mut request = attach::request(&args.argv, &args.command);
    if args.memory.is_some() || args.pids.is_some() || args.cpus.is_some() {
        let memory = args.memory.map(|mib| mib << 20);
        request = request.limits(Limits { memory, pids: args.pids, cpu_milli: args.cpus });
    }
    let names = Names::of(&args.argv, &args.command);
    if args.detach {
        if let Some(timeout) = args.timeout {
            request = request.timeout(timeout);
        }
        let started = agent.start_detached(&request, None).map_err(|error| match error {
            ExecError::NotStarted(status) => attach::could_not_start(&status, &names),
            error => attach::refuse(error),
        })?;
        output::line(&started.id.to_string())?;
        return Ok(0);
    }
    // Exiting closes the connection, and the agent then ends what this client started.
    let abort = |code| exit::leave(Ok(code));
    let end = attach::attach(&agent, request, args.timeout, signals, abort);
    let end = end.map_err(attach::refuse)?;
    if let attach::End::Exited(status) = &end
        && status.oom
    {
        output::remark(false, &attach::oom_remark(&agent));
    }
    end.outcome(&names)
}
