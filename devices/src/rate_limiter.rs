//! Limits a device's bytes and operations per time.
//!
//! Every device that has limits uses it. The arithmetic is exact and independent of a clock
//! (`bucket.rs`), so that tests can check properties over simulated days; this file adds the host's
//! clock, and the time at which the device may continue.

mod bucket;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use bucket::Bucket;

/// The maximum refill time of a bucket: a day.
pub const REFILL_TIME_MS_MAX: u64 = 24 * 60 * 60 * 1000;

// A longer wait is checked again after this time, so that no time far in the future has to be
// exact.
const WAIT_MAX: Duration = Duration::from_secs(60 * 60);

/// A token bucket: full at first, refilled at an even pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketConfig {
    /// The number of tokens that the bucket holds.
    pub size: u64,
    /// Tokens to spend before those of the bucket, never refilled.
    #[serde(default)]
    pub one_time_burst: u64,
    /// The time in which an empty bucket is refilled.
    pub refill_time_ms: u64,
}

/// The limits of a device; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimiterConfig {
    #[serde(default)]
    pub bytes: Option<BucketConfig>,
    #[serde(default)]
    pub ops: Option<BucketConfig>,
}

/// Why a limit is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RateLimiterError {
    #[error("{bucket}: size is 0; leave the limit out, or give at least 1")]
    Size { bucket: &'static str },
    #[error("{bucket}: refill_time_ms is {refill_time_ms}; give 1 to {REFILL_TIME_MS_MAX}")]
    RefillTime { bucket: &'static str, refill_time_ms: u64 },
}

/// The cost of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    pub bytes: u64,
    pub ops: u64,
}

impl BucketConfig {
    /// Configures `tokens` per second, with bursts of as many.
    pub fn per_second(tokens: u64) -> Self {
        Self { size: tokens, one_time_burst: 0, refill_time_ms: 1000 }
    }

    fn validate(&self, bucket: &'static str) -> Result<(), RateLimiterError> {
        let refill_time_ms = self.refill_time_ms;
        if self.size == 0 {
            return Err(RateLimiterError::Size { bucket });
        }
        if refill_time_ms == 0 || refill_time_ms > REFILL_TIME_MS_MAX {
            return Err(RateLimiterError::RefillTime { bucket, refill_time_ms });
        }
        Ok(())
    }
}

impl RateLimiterConfig {
    /// Refuses buckets that hold nothing or never fill.
    pub fn validate(&self) -> Result<(), RateLimiterError> {
        self.bytes.map_or(Ok(()), |bytes| bytes.validate("bytes"))?;
        self.ops.map_or(Ok(()), |ops| ops.validate("ops"))
    }

    /// Returns whether there is any limit.
    pub fn is_limited(&self) -> bool {
        self.bytes.is_some() || self.ops.is_some()
    }
}

impl Cost {
    /// Returns the cost of one operation that moves `bytes` bytes.
    pub fn op(bytes: u64) -> Self {
        Self { bytes, ops: 1 }
    }
}

/// Two buckets, and the time at which they hold enough again.
///
/// A worker calls `admit` before each request. If it returns false, the worker leaves the request
/// in the queue, and tries again at the time that `take_wake` returns.
#[derive(Debug)]
pub struct RateLimiter {
    bytes: Option<Bucket>,
    ops: Option<Bucket>,
    start: Instant,
    wakes_at: Option<Instant>,
}

impl RateLimiter {
    /// Creates a limiter with full buckets.
    pub fn new(config: &RateLimiterConfig) -> Self {
        let mut limiter = Self { bytes: None, ops: None, start: Instant::now(), wakes_at: None };
        limiter.configure(config);
        limiter
    }

    /// Replaces the limits. The buckets start full; waiting requests are retried at the next
    /// `admit` or at the old limits' time, whichever comes first.
    pub fn configure(&mut self, config: &RateLimiterConfig) {
        let now = self.start.elapsed();
        self.bytes = config.bytes.map(|bucket| Bucket::new(&bucket, now));
        self.ops = config.ops.map(|bucket| Bucket::new(&bucket, now));
    }

    /// Charges a request and returns true, or charges nothing, records the time to wait for, and
    /// returns false.
    ///
    /// A request that costs more than a bucket holds is admitted when the bucket is full, and the
    /// bucket then owes the rest.
    pub fn admit(&mut self, cost: Cost) -> bool {
        let now = self.start.elapsed();
        match self.admit_at(cost, now) {
            None => true,
            Some(wait) => {
                let at = self.start + now + wait.min(WAIT_MAX);
                // A wake-up that is too early only leads to another `admit`.
                self.wakes_at = Some(self.wakes_at.map_or(at, |known| known.min(at)));
                false
            }
        }
    }

    /// Charges for something that has happened already, such as a received packet. The buckets may
    /// then owe tokens.
    pub fn charge(&mut self, cost: Cost) {
        let now = self.start.elapsed();
        self.each(cost, |bucket, tokens| bucket.charge(tokens, now));
    }

    /// Refunds the cost of a request that was not carried out.
    pub fn refund(&mut self, cost: Cost) {
        self.each(cost, Bucket::refund);
    }

    /// Returns when a request that was refused since the last call may be tried again.
    pub fn take_wake(&mut self) -> Option<Instant> {
        self.wakes_at.take()
    }

    /// Returns None if the request is admitted, otherwise how long it has to wait.
    fn admit_at(&mut self, cost: Cost, now: Duration) -> Option<Duration> {
        let wait = |bucket: &mut Option<Bucket>, tokens| {
            bucket.as_mut().and_then(|bucket| bucket.wait_for(tokens, now))
        };
        let (bytes, ops) = (wait(&mut self.bytes, cost.bytes), wait(&mut self.ops, cost.ops));
        let longest = bytes.max(ops);
        if longest.is_none() {
            self.each(cost, |bucket, tokens| bucket.charge(tokens, now));
        }
        longest
    }

    fn each(&mut self, cost: Cost, mut act: impl FnMut(&mut Bucket, u64)) {
        for (bucket, tokens) in [(&mut self.bytes, cost.bytes), (&mut self.ops, cost.ops)] {
            if let Some(bucket) = bucket {
                act(bucket, tokens);
            }
        }
    }
}
