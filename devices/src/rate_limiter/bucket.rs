//! A token bucket in exact arithmetic, told the time by its caller.
//!
//! Levels are counted in tokens times nanoseconds of refill time: then one nanosecond adds exactly `size`
//! of them, and neither rounding nor the frequency of questions changes what a device gets.

use std::time::Duration;

use super::BucketConfig;

/// Tokens, and those that are owed.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    // What one token is worth, and how much is added each nanosecond.
    unit: i128,
    per_ns: i128,
    // At most `full`; below zero after an expense larger than the bucket.
    level: i128,
    full: i128,
    burst: u64,
    last: Duration,
}

impl Bucket {
    /// A full bucket. `config` is valid, which keeps `full` below 2^111.
    pub fn new(config: &BucketConfig, now: Duration) -> Self {
        let unit = i128::from(config.refill_time_ms.max(1)).saturating_mul(1_000_000);
        let per_ns = i128::from(config.size.max(1));
        let full = per_ns.saturating_mul(unit);
        Self { unit, per_ns, level: full, full, burst: config.one_time_burst, last: now }
    }

    /// None if `tokens` may be spent now, otherwise how long until they may.
    pub fn wait_for(&mut self, tokens: u64, now: Duration) -> Option<Duration> {
        self.refill(now);
        let needed = self.worth(tokens.saturating_sub(self.burst)).min(self.full);
        let missing = needed.saturating_sub(self.level);
        // An expense of nothing passes even while the bucket owes.
        if missing <= 0 || needed == 0 {
            return None;
        }
        let ns = missing.saturating_add(self.per_ns - 1) / self.per_ns;
        Some(Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX)))
    }

    /// Spends `tokens`, whether they are there or not: first the burst's, then the bucket's.
    pub fn charge(&mut self, tokens: u64, now: Duration) {
        self.refill(now);
        let from_burst = tokens.min(self.burst);
        self.burst -= from_burst;
        self.level = self.level.saturating_sub(self.worth(tokens - from_burst));
    }

    /// Puts `tokens` back, as far as the bucket holds them.
    pub fn refund(&mut self, tokens: u64) {
        self.level = self.level.saturating_add(self.worth(tokens)).min(self.full);
    }

    fn worth(&self, tokens: u64) -> i128 {
        i128::from(tokens).saturating_mul(self.unit)
    }

    /// A clock that stands still or goes back adds nothing; one that leaps ahead fills the bucket at most.
    fn refill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.last).as_nanos();
        let passed = i128::try_from(passed).unwrap_or(i128::MAX);
        let added = passed.saturating_mul(self.per_ns);
        self.level = self.level.saturating_add(added).min(self.full);
        self.last = self.last.max(now);
    }
}
