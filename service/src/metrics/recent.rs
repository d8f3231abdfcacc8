//! The durations of the last operations, for plots that begin before their first look.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::Operation;

/// The most operations that are kept.
const KEPT: usize = 512;

/// An operation that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// When it ended, in milliseconds since 1970.
    pub time_ms: u64,
    /// The operation.
    pub operation: Operation,
    /// How long it took.
    pub took: Duration,
    /// Whether it did what was asked.
    pub succeeded: bool,
}

/// The last operations, oldest first.
#[derive(Default)]
pub struct Recent {
    timings: Mutex<VecDeque<Timing>>,
}

impl Recent {
    /// Adds an operation, and forgets the oldest if there are too many.
    pub fn push(&self, timing: Timing) {
        let mut timings = self.timings.lock().unwrap_or_else(PoisonError::into_inner);
        if timings.len() >= KEPT {
            timings.pop_front();
        }
        timings.push_back(timing);
    }

    /// Returns the operations that are kept.
    pub fn list(&self) -> Vec<Timing> {
        self.timings.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }
}
