//! `cargo xtask host`: the words around a nested host that stays up.
//!
//! The host itself is in `nested_host/background.rs`; this is only what a person sees of it.

use std::process::ExitCode;

use crate::nested_host::background::{self, BackgroundError};
use crate::{progress, report};

#[derive(Clone, Copy, Debug, clap::Subcommand)]
pub enum Verb {
    /// Boot it, unless it is up; it is paused while no command runs in it
    Up,
    /// End it
    Down,
    /// Say whether it is up; fails if it is not
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

/// The background process; its stderr is the log.
pub fn serve() -> ExitCode {
    finish(background::serve().map(|()| ExitCode::SUCCESS))
}

fn finish(result: Result<ExitCode, BackgroundError>) -> ExitCode {
    result.unwrap_or_else(|e| {
        eprintln!("host: {}", report::chain(&e));
        ExitCode::FAILURE
    })
}
