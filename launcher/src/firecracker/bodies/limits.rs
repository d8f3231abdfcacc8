//! Limits on what a device may move: two buckets of tokens, one for bytes and one for operations.

use pvmm::RateLimiterConfig;
use pvmm::config::BucketConfig;
use serde::{Deserialize, Serialize};

/// A bucket; one without a size or without a time to fill is no limit.
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

    /// What is limited after `change`: a bucket that it does not name stays as it is.
    pub fn changed_by(self, change: Self) -> Self {
        Self { bandwidth: change.bandwidth.or(self.bandwidth), ops: change.ops.or(self.ops) }
    }
}

/// What a device without a limiter is held to: nothing.
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
