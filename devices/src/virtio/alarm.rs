//! The earliest time at which a device of a loop wants to run even if no event occurs.
//!
//! A timer file descriptor for each device would cost every machine a handful of descriptors, most
//! of them never used. Instead, the loop waits no longer than until the earliest time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const NEVER: u64 = u64::MAX;

/// The earliest of the times that were set. Clones share it. Only one thread at a time has the
/// devices, so relaxed ordering suffices.
#[derive(Clone, Debug)]
pub struct Alarm {
    start: Instant,
    /// Nanoseconds after `start`.
    at: Arc<AtomicU64>,
}

impl Alarm {
    pub fn new() -> Self {
        Self { start: Instant::now(), at: Arc::new(AtomicU64::new(NEVER)) }
    }

    /// Makes the alarm expire at `at`, or earlier if it is already set to an earlier time.
    pub fn set(&self, at: Instant) {
        let nanos = at.saturating_duration_since(self.start).as_nanos();
        let nanos = u64::try_from(nanos).unwrap_or(NEVER);
        self.at.fetch_min(nanos, Ordering::Relaxed);
    }

    /// Returns how long it is until the alarm expires, if it is set.
    pub fn wait(&self) -> Option<Duration> {
        match self.at.load(Ordering::Relaxed) {
            NEVER => None,
            nanos => Some(Duration::from_nanos(nanos).saturating_sub(self.start.elapsed())),
        }
    }

    pub fn clear(&self) {
        self.at.store(NEVER, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarm_goes_off_at_the_earliest_time_that_was_set() {
        let (alarm, now) = (Alarm::new(), Instant::now());
        assert_eq!(alarm.wait(), None);
        let second = Duration::from_secs(1);
        alarm.clone().set(now + 3 * second);
        alarm.set(now + 9 * second);
        assert!(alarm.wait().is_some_and(|wait| wait > second && wait <= 3 * second));
        alarm.set(now);
        assert_eq!(alarm.wait(), Some(Duration::ZERO));
        alarm.clear();
        assert_eq!(alarm.wait(), None);
    }
}
