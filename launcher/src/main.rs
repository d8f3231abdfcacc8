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
    end_on_panic();
    pvmm_sandbox::sys::process::keep_one_heap();
    if let Err(error) = pvmm_sandbox::sys::dumps::forbid() {
        exit::leave(Err(error.into()));
    }
    if std::env::args_os().next().is_some_and(|name| name == pvmm_sandbox::vmm_process::copy::NAME)
    {
        pvmm_sandbox::vmm_process::copy::run();
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

/// Aborts on panic: a panic is a bug, and a VM that has lost a thread must not continue.
fn end_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        std::process::abort();
    }));
}
