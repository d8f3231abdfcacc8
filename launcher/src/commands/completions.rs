//! `pvmm completions`: a shell's completion script.
//!
//! Made from the same definitions as the parser, so that it never offers what is not there.

use clap::CommandFactory;

use crate::cli::{Cli, Completions};
use crate::exit::Outcome;

pub fn completions(args: Completions) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "pvmm", &mut script);
    crate::output::raw(&script)?;
    Ok(0)
}
