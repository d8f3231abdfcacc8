//! `cargo xtask host`: the words around a nested host that stays up.
//!
//! The host itself is in `nested_host/background.rs`; this is only what a person sees of it.

use std::ffi::OsString;
use std::process::ExitCode;

use crate::nested_host::background::{self, BackgroundError};
use crate::{progress, report};

pub fn run(arguments: &[OsString]) -> ExitCode {
    let verb = arguments.first().and_then(|verb| verb.to_str());
    match verb {
        Some("up") => finish(background::up().map(|state| {
            progress::step(format!("the nested host is up (process {})", state.pid));
            ExitCode::SUCCESS
        })),
        Some("down") => finish(background::down().map(|was_up| {
            println!("{}", if was_up { "down" } else { "was not up" });
            ExitCode::SUCCESS
        })),
        Some("status") => match background::status() {
            Some(state) => {
                println!("up: process {}, QEMU {}, key {}", state.pid, state.qemu_pid, state.key);
                ExitCode::SUCCESS
            }
            None => {
                println!("down");
                ExitCode::FAILURE
            }
        },
        _ => {
            eprintln!("usage: cargo xtask host up|down|status");
            ExitCode::from(2)
        }
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
