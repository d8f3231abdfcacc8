//! Prints what is being done and since when, as plain lines on stderr.
//!
//! Here so that preparing a kernel, a host or a template never looks like a hang, and stdout stays
//! the command's own.

use std::sync::OnceLock;
use std::time::Instant;

fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

/// Starts the clock; later lines count from here.
pub fn init() {
    start();
}

/// Says what begins now.
pub fn step(what: impl std::fmt::Display) {
    eprintln!("[{:5.1}s] {what}", start().elapsed().as_secs_f64());
}
