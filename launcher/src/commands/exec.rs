//! `pvmm exec`: runs a command in a running VM.
//!
//! Any number of commands may run at once; each has its own connection to the agent.

use pvmm::exec::{ExecError, Limits};

use crate::attach;
use crate::cli::Exec;
use crate::exit::{self, Outcome};
use crate::output;
use pvmm_sandbox::guest_agent;
use pvmm_sandbox::sys::signals::Signals;
use pvmm_sandbox::vm_dir::Base;

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
    let names = attach::names(&args.argv, &args.command);
    if args.detach {
        if let Some(timeout) = args.timeout {
            request = request.timeout(timeout);
        }
        let started = agent.start_detached(&request, None).map_err(|error| match error {
            ExecError::NotStarted(status) => guest_agent::could_not_start(&status, &names),
            error => guest_agent::refuse_exec(error),
        })?;
        output::line(&started.id.to_string())?;
        return Ok(0);
    }
    // Exiting closes the connection, and the agent then ends what this client started.
    let abort = |code| exit::leave(Ok(code));
    let end = attach::attach(&agent, request, args.timeout, signals, abort);
    let end = end.map_err(guest_agent::refuse_exec)?;
    if let attach::End::Exited(status) = &end
        && status.oom
    {
        output::remark(false, &attach::oom_remark(&agent));
    }
    end.outcome(&names)
}
