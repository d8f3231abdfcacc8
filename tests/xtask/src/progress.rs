//! Prints each step and the time since the start, as plain lines on stderr.
//!
//! The lines show that a long preparation has not hung; stdout is only for the command.

use std::sync::OnceLock;
use std::time::Instant;

fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Starts the clock of the printed times.
pub fn init() {
    start();
}

/// Prints what begins now.
pub fn step(what: impl std::fmt::Display) {
    eprintln!("[{:5.1}s] {what}", start().elapsed().as_secs_f64());
}
