//! One file per verb.
//!
//! A verb takes its parsed arguments and returns the exit code or a failure; nothing else knows what
//! was typed.

mod completions;
mod man;
mod ps;

use crate::cli::{Cli, Verb};
use crate::exit::{Failure, Outcome};

/// Runs the verb.
pub fn dispatch(cli: Cli) -> Outcome {
    match cli.verb {
        Verb::Ps(args) => ps::ps(args, cli.quiet),
        Verb::Completions(args) => completions::completions(args),
        Verb::Man(args) => man::man(args),
        _ => Err(Failure::fault("not wired")),
    }
}
