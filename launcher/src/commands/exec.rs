//! `pvmm exec`: a command in a VM that is running already.
//!
//! Any number of them may run at once; each has its own connection to the agent.

use std::time::Duration;

use crate::attach::{self, Names};
use crate::cli::Exec;
use crate::exit::{self, Outcome};
use crate::sys::signals::Signals;
use crate::vm_dir::Base;

/// How long the agent of a running VM may take to answer.
const CONNECT_PATIENCE: Duration = Duration::from_secs(20);

pub fn exec(args: Exec) -> Outcome {
    attach::require_terminal(&args.command)?;
    let vm = Base::open()?.find(&args.vm)?;
    vm.require_running()?;
    let signals = Signals::hold(args.command.signals())?;
    let agent = attach::connect(&vm.dir, CONNECT_PATIENCE).map_err(attach::refuse_agent)?;
    let request = attach::request(&args.argv, &args.command);
    // Leaving closes the connection, and the agent then ends what this client started.
    let abort = |code| exit::leave(Ok(code));
    let names = Names::of(&args.argv, &args.command);
    let end = attach::attach(&agent, request, args.timeout, signals, abort);
    end.map_err(attach::refuse)?.outcome(&names)
}
