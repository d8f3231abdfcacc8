//! A token bucket in exact arithmetic; the caller passes the time.
//!
//! Levels are counted in tokens times nanoseconds of refill time: one nanosecond then adds exactly
//! `size` of them, and neither rounding nor the frequency of calls changes what a device gets.

use std::time::Duration;

use super::BucketConfig;

/// A number of tokens, which is negative while tokens are owed.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    // The level of one token, and the level added each nanosecond.
    unit: i128,
    per_ns: i128,
    // At most `full`; negative after a charge larger than the level.
    level: i128,
    full: i128,
    burst: u64,
    last: Duration,
}

impl Bucket {
    /// Creates a full bucket. `config` must be valid, which keeps `full` below 2^111.
    pub fn new(config: &BucketConfig, now: Duration) -> Self {
        let unit = i128::from(config.refill_time_ms.max(1)).saturating_mul(1_000_000);
        let per_ns = i128::from(config.size.max(1));
        let full = per_ns.saturating_mul(unit);
        Self { unit, per_ns, level: full, full, burst: config.one_time_burst, last: now }
    }

    /// Returns None if `tokens` may be spent now, otherwise how long until they may.
    pub fn wait_for(&mut self, tokens: u64, now: Duration) -> Option<Duration> {
        self.refill(now);
        let needed = self.worth(tokens.saturating_sub(self.burst)).min(self.full);
        let missing = needed.saturating_sub(self.level);
        // A cost of zero is admitted even while the bucket owes tokens.
        if missing <= 0 || needed == 0 {
            return None;
        }
        let ns = missing.saturating_add(self.per_ns - 1) / self.per_ns;
        Some(Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX)))
    }

    /// Spends `tokens`, available or not: first those of the burst, then those of the bucket.
    pub fn charge(&mut self, tokens: u64, now: Duration) {
        self.refill(now);
        let from_burst = tokens.min(self.burst);
        self.burst -= from_burst;
        self.level = self.level.saturating_sub(self.worth(tokens - from_burst));
    }

    /// Puts `tokens` back, up to the size of the bucket.
    pub fn refund(&mut self, tokens: u64) {
        self.level = self.level.saturating_add(self.worth(tokens)).min(self.full);
    }

    fn worth(&self, tokens: u64) -> i128 {
        i128::from(tokens).saturating_mul(self.unit)
    }

    /// Adds the tokens of the time passed. A clock that stops or goes back adds nothing; one that
    /// leaps ahead at most fills the bucket.
    fn refill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.last).as_nanos();
        let passed = i128::try_from(passed).unwrap_or(i128::MAX);
        let added = passed.saturating_mul(self.per_ns);
        self.level = self.level.saturating_add(added).min(self.full);
        self.last = self.last.max(now);
    }
}
