//! Holds a device to so many bytes and so many operations per time.
//!
//! Apart from the devices because block, net and rng share it. The arithmetic is exact and knows no clock
//! (`bucket.rs`), so that properties can be checked over days in a second; what stands here adds the host's
//! clock and a timer that wakes the device when it may go on.

mod bucket;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vmm_sys_util::timerfd::TimerFd;

use bucket::Bucket;

/// The longest time in which a bucket may fill: a day.
pub const REFILL_TIME_MS_MAX: u64 = 24 * 60 * 60 * 1000;

// A wait is looked at again after this long: no timer far in the future has to be right.
const WAIT_MAX: Duration = Duration::from_secs(60 * 60);

/// A bucket of tokens: full at first, and filling at an even pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketConfig {
    /// How many tokens the bucket holds.
    pub size: u64,
    /// Tokens to spend before those of the bucket, never refilled.
    #[serde(default)]
    pub one_time_burst: u64,
    /// How long an empty bucket takes to fill.
    pub refill_time_ms: u64,
}

/// What a device is held to; nothing at all by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimiterConfig {
    #[serde(default)]
    pub bytes: Option<BucketConfig>,
    #[serde(default)]
    pub ops: Option<BucketConfig>,
}

/// A limit that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RateLimiterError {
    #[error("{bucket}: size is 0; leave the limit out, or give at least 1")]
    Size { bucket: &'static str },
    #[error("{bucket}: refill_time_ms is {refill_time_ms}; give 1 to {REFILL_TIME_MS_MAX}")]
    RefillTime { bucket: &'static str, refill_time_ms: u64 },
}

/// What one request costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    pub bytes: u64,
    pub ops: u64,
}

impl BucketConfig {
    /// So many tokens each second, and as many at once.
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

    /// Whether there is any limit.
    pub fn is_limited(&self) -> bool {
        self.bytes.is_some() || self.ops.is_some()
    }
}

impl Cost {
    /// One operation that moves so many bytes.
    pub fn op(bytes: u64) -> Self {
        Self { bytes, ops: 1 }
    }
}

/// Two buckets and the timer that tells when they hold enough again.
///
/// A worker registers the limiter's descriptor, asks `admit` before each request, and leaves the request
/// where it is on a no. When the descriptor becomes readable it calls `clear_timer` and goes on.
#[derive(Debug)]
pub struct RateLimiter {
    bytes: Option<Bucket>,
    ops: Option<Bucket>,
    start: Instant,
    timer: TimerFd,
    // When the timer will have fired, on the limiter's own clock.
    wakes_at: Option<Duration>,
}

impl RateLimiter {
    /// A limiter with full buckets. Its timer is opened now, limits or not, so that limits can be set
    /// later by a process that may no longer open anything.
    pub fn new(config: &RateLimiterConfig) -> io::Result<Self> {
        let mut limiter = Self {
            bytes: None,
            ops: None,
            start: Instant::now(),
            timer: TimerFd::new()?,
            wakes_at: None,
        };
        limiter.configure(config);
        Ok(limiter)
    }

    /// Replaces the limits. The buckets start full; who waits is woken by the next `admit` or at the old
    /// limits' time, whichever comes first.
    pub fn configure(&mut self, config: &RateLimiterConfig) {
        let now = self.start.elapsed();
        self.bytes = config.bytes.map(|bucket| Bucket::new(&bucket, now));
        self.ops = config.ops.map(|bucket| Bucket::new(&bucket, now));
    }

    /// Pays for a request and says yes, or takes nothing, sets the timer and says no.
    ///
    /// A request that costs more than a bucket holds passes when the bucket is full, and the bucket then
    /// owes the rest.
    pub fn admit(&mut self, cost: Cost) -> bool {
        let now = self.start.elapsed();
        match self.admit_at(cost, now) {
            None => true,
            Some(wait) => {
                self.wake_after(wait.min(WAIT_MAX), now);
                false
            }
        }
    }

    /// Pays for what has happened already, such as a packet that came in; the buckets may then owe.
    pub fn charge(&mut self, cost: Cost) {
        let now = self.start.elapsed();
        self.each(cost, |bucket, tokens| bucket.charge(tokens, now));
    }

    /// Takes back what was paid for a request that was not carried out.
    pub fn refund(&mut self, cost: Cost) {
        self.each(cost, Bucket::refund);
    }

    /// Takes the timer's event, so that the descriptor is no longer readable.
    pub fn clear_timer(&mut self) {
        self.wakes_at = None;
        // Disarming also forgets an expiry, and unlike reading it never waits.
        if let Err(error) = self.timer.clear() {
            log::error!("rate limiter: cannot clear its timer: {error}");
        }
    }

    /// None if the request passes, otherwise how long it has to wait.
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

    fn wake_after(&mut self, wait: Duration, now: Duration) {
        // Zero would disarm it.
        let wait = wait.max(Duration::from_nanos(1));
        let at = now.saturating_add(wait);
        // Whoever is woken too early asks again.
        if self.wakes_at.is_some_and(|set| set <= at) {
            return;
        }
        match self.timer.reset(wait, None) {
            Ok(()) => self.wakes_at = Some(at),
            Err(error) => log::error!("rate limiter: cannot set its timer: {error}"),
        }
    }
}

impl AsRawFd for RateLimiter {
    /// Readable when a request that was refused may be tried again.
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}
