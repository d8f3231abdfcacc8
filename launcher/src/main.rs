//! The `pvmm` program: parses the arguments, runs one command, exits with its code.
//!
//! `cli.rs` defines the command line, `commands/` has what each command does, `exit.rs` the exit
//! codes.

mod args;
mod attach;
mod cli;
mod commands;
mod control;
mod drive;
mod egress;
mod exit;
mod firecracker;
mod guest_agent;
mod jail;
mod leftovers;
mod log_file;
mod logger;
mod machine;
mod net_card;
mod output;
mod overrides;
mod ports;
mod prepare;
mod progress;
mod rootfs;
mod scratch;
mod screen;
mod seccomp;
mod secrets;
mod snapshots;
mod sys;
mod vm_dir;
mod vmm_process;
mod warm;

use clap::Parser;

fn main() {
    end_on_panic();
    sys::process::keep_one_heap();
    if let Err(error) = sys::dumps::forbid() {
        exit::leave(Err(error.into()));
    }
    if std::env::args_os().next().is_some_and(|name| name == vmm_process::copy::NAME) {
        vmm_process::copy::run();
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
