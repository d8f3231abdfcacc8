//! The `pvmm` program: parses the arguments, runs one command, exits with its code.
//!
//! `cli.rs` defines the command line, `commands/` has what each command does, `exit.rs` the exit
//! codes.

mod args;
mod attach;
mod cli;
mod commands;
mod exit;
mod firecracker;
mod interrupt;
mod leftovers;
mod output;
mod progress;
mod screen;
mod secrets;
mod sys;

use clap::Parser;

fn main() {
    if let Err(error) = pvmm_sandbox::vmm_process::begin() {
        exit::leave(Err(error.into()));
    }
    if let Some((program, words)) = firecracker::words(std::env::args_os().collect()) {
        std::process::exit(firecracker::run(program, words).into());
    }
    let result = match cli::Cli::try_parse() {
        Ok(cli) => commands::dispatch(cli),
        Err(error) => cli::refuse(error),
    };
    exit::leave(result)
}
