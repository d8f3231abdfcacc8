//! `pvmm attach`: attaches to a command that `pvmm exec -d` started.
//!
//! Detaching does not end the command.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use pvmm::agent::AgentError;
use pvmm::exec::{AttachFrom, ExecError};

use crate::attach::{self, Manner};
use crate::cli::Attach;
use crate::exit::{self, Failure, Outcome};
use crate::output;
use pvmm_sandbox::guest_agent::{self, Names};
use pvmm_sandbox::sys::signals::{Signals, WITH_TERMINAL};
use pvmm_sandbox::vm_dir::Base;

/// How long the agent of a running VM may take to answer.
const PATIENCE: Duration = Duration::from_secs(20);

pub fn attach(args: Attach, quiet: bool) -> Outcome {
    let vm = Base::open()?.find(&args.process.vm)?;
    vm.require_running()?;
    let signals = Signals::hold(&WITH_TERMINAL)?;
    let agent =
        guest_agent::connect(&vm.dir, guest_agent::PATIENCE).map_err(guest_agent::refuse)?;
    let from = AttachFrom { stdout: args.from, stderr: 0, input: args.interactive };
    let refuse = |error| refuse(error, &args.process.vm);
    let process = agent.attach(args.process.id, from).map_err(refuse)?;
    let replay = process.replay(Instant::now() + PATIENCE).map_err(refuse)?.unwrap_or_default();
    let lost = replay.stdout_from.saturating_sub(args.from);
    if lost > 0 {
        output::remark(quiet, &format!("{lost} bytes of standard output are no longer kept."));
    }
    let has_terminal = replay.terminal && args.interactive && io::stdin().is_terminal();
    if has_terminal {
        // The terminal here may differ in size from the last one.
        let _ = process.signaller().resize(crate::sys::terminal::size());
    }
    let manner = Manner { has_terminal, owns: false };
    let end = attach::follow(process, None, manner, signals, |code| exit::leave(Ok(code)));
    end.map_err(refuse)?.outcome(&Names::default())
}

/// Maps an error; for a command that does not exist, the hint says how to list those that do.
pub fn refuse(error: ExecError, vm: &str) -> Failure {
    match error {
        ExecError::Agent(AgentError::Refused(refusal)) if refusal.errno == Some(libc::ESRCH) => {
            Failure::usage(format!("'{vm}' has no such command"))
                .hint(format!("list them with 'pvmm ps {vm}'"))
        }
        error => guest_agent::refuse_exec(error),
    }
}
