//! A request to stop: set by a signal handler, seen by every long piece of work here.
//! With it Ctrl-C unwinds and removes what was half built, instead of dying beside it.

use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Asks all work to stop soon. Safe to call from a signal handler.
pub fn request() {
    REQUESTED.store(true, Ordering::Relaxed);
}

pub(crate) fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}
