//! `cargo xtask host`: the commands for a nested host that stays up.
//!
//! The nested host itself is in `nested_host/background.rs`.

use std::process::ExitCode;

use crate::nested_host::background::{self, BackgroundError};
use crate::{progress, report};

#[derive(Clone, Copy, Debug, clap::Subcommand)]
pub enum Verb {
    /// Boot the nested host, unless it is up; it is paused while no command runs in it
    Up,
    /// End the nested host
    Down,
    /// Print whether the nested host is up; fails if it is not
    Status,
}

pub fn run(verb: Verb) -> ExitCode {
    match verb {
        Verb::Up => finish(background::up().map(|state| {
            progress::step(format!("the nested host is up (process {})", state.pid));
            ExitCode::SUCCESS
        })),
        Verb::Down => finish(background::down().map(|was_up| {
            println!("{}", if was_up { "down" } else { "was not up" });
            ExitCode::SUCCESS
        })),
        Verb::Status => match background::status() {
            Some(state) => {
                println!("up: process {}, QEMU {}, key {}", state.pid, state.qemu_pid, state.key);
                ExitCode::SUCCESS
            }
            None => {
                println!("down");
                ExitCode::FAILURE
            }
        },
    }
}

/// Runs the background process. Its standard error is the log.
pub fn serve() -> ExitCode {
    finish(background::serve().map(|()| ExitCode::SUCCESS))
}

fn finish(result: Result<ExitCode, BackgroundError>) -> ExitCode {
    result.unwrap_or_else(|e| {
        eprintln!("host: {}", report::chain(&e));
        ExitCode::FAILURE
    })
}
