//! `pvmm completions`: prints a shell's completion script.
//!
//! Generated from the parser's definitions, so that it always matches them.

use clap::CommandFactory;

use crate::cli::{Cli, Completions};
use crate::exit::Outcome;

pub fn completions(args: Completions) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "pvmm", &mut script);
    crate::output::raw(&script)?;
    Ok(0)
}
