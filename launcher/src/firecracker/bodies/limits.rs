//! Rate limits of a device: two token buckets, one for bytes and one for operations.

use pvmm::RateLimiterConfig;
use pvmm::config::BucketConfig;
use serde::{Deserialize, Serialize};

/// A token bucket; one of size zero or with a refill time of zero is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TokenBucket {
    pub size: u64,
    #[serde(default)]
    pub one_time_burst: Option<u64>,
    pub refill_time: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RateLimiter {
    #[serde(default)]
    pub bandwidth: Option<TokenBucket>,
    #[serde(default)]
    pub ops: Option<TokenBucket>,
}

impl TokenBucket {
    pub fn config(self) -> Option<BucketConfig> {
        let unlimited = self.size == 0 || self.refill_time == 0;
        (!unlimited).then(|| BucketConfig {
            size: self.size,
            one_time_burst: self.one_time_burst.unwrap_or(0),
            refill_time_ms: self.refill_time,
        })
    }
}

impl RateLimiter {
    pub fn config(self) -> RateLimiterConfig {
        RateLimiterConfig {
            bytes: self.bandwidth.and_then(TokenBucket::config),
            ops: self.ops.and_then(TokenBucket::config),
        }
    }

    /// Returns the limits after `change`; a bucket that `change` does not name keeps its value.
    pub fn changed_by(self, change: Self) -> Self {
        Self { bandwidth: change.bandwidth.or(self.bandwidth), ops: change.ops.or(self.ops) }
    }
}

/// Returns the device configuration of an optional limiter; without one there is no limit.
pub fn config_of(limiter: Option<RateLimiter>) -> RateLimiterConfig {
    limiter.map(RateLimiter::config).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: TokenBucket = TokenBucket { size: 10, one_time_burst: None, refill_time: 100 };
    const NONE: TokenBucket = TokenBucket { size: 0, one_time_burst: None, refill_time: 0 };

    #[test]
    fn bucket_without_size_or_time_is_no_limit() {
        assert!(LIMIT.config().is_some());
        assert_eq!(NONE.config(), None);
        assert_eq!(TokenBucket { refill_time: 0, ..LIMIT }.config(), None);
    }

    #[test]
    fn change_of_one_bucket_leaves_the_other() {
        let both = RateLimiter { bandwidth: Some(LIMIT), ops: Some(LIMIT) };
        let change = RateLimiter { bandwidth: Some(NONE), ops: None };
        assert_eq!(both.changed_by(change).config().bytes, None);
        assert!(both.changed_by(change).config().ops.is_some());
        assert_eq!(both.changed_by(RateLimiter::default()), both);
    }
}
