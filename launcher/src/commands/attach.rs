//! `pvmm attach`: back to a command that `pvmm exec -d` started.
//!
//! Whoever attaches only looks on: when they leave, the command goes on.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use pvmm::agent::AgentError;
use pvmm::exec::{AttachFrom, ExecError};

use crate::attach::{self, Manner, Names};
use crate::cli::Attach;
use crate::exit::{self, Failure, Outcome};
use crate::output;
use crate::sys::signals::{Signals, WITH_TERMINAL};
use crate::vm_dir::Base;

/// How long the agent of a running VM may take to answer.
const PATIENCE: Duration = Duration::from_secs(20);

pub fn attach(args: Attach, quiet: bool) -> Outcome {
    let vm = Base::open()?.find(&args.process.vm)?;
    vm.require_running()?;
    let signals = Signals::hold(&WITH_TERMINAL)?;
    let agent = attach::connect(&vm.dir, attach::PATIENCE).map_err(attach::refuse_agent)?;
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
        // The screen here may be of another size than the last one.
        let _ = process.signaller().resize(crate::sys::terminal::size());
    }
    let manner = Manner { has_terminal, owns: false };
    let end = attach::follow(process, None, manner, signals, |code| exit::leave(Ok(code)));
    end.map_err(refuse)?.outcome(&Names::default())
}

/// A process that is not there gets the way to those that are.
pub fn refuse(error: ExecError, vm: &str) -> Failure {
    match error {
        ExecError::Agent(AgentError::Refused(refusal)) if refusal.errno == Some(libc::ESRCH) => {
            Failure::usage(format!("'{vm}' has no such command"))
                .hint(format!("list them with 'pvmm ps {vm}'"))
        }
        error => attach::refuse(error),
    }
}
