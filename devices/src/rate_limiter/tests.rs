//! The guarantees of a rate limiter, over random requests and times.

use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::bucket::Bucket;
use super::*;

fn config(size: u64, one_time_burst: u64, refill_time_ms: u64) -> BucketConfig {
    BucketConfig { size, one_time_burst, refill_time_ms }
}

fn any_config() -> impl Strategy<Value = BucketConfig> {
    let refill = prop_oneof![1..50u64, 1..=REFILL_TIME_MS_MAX];
    let size = prop_oneof![1..100u64, 1..=u64::MAX];
    let burst = prop_oneof![Just(0u64), 0..100u64, any::<u64>()];
    (size, burst, refill).prop_map(|(size, burst, refill)| config(size, burst, refill))
}

fn limiter(bytes: Option<BucketConfig>, ops: Option<BucketConfig>) -> RateLimiter {
    RateLimiter::new(&RateLimiterConfig { bytes, ops })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    /// Over any window, no more is spent than burst, bucket and refill allow, except for the one
    /// request that was larger than the bucket and leaves it in debt.
    #[test]
    fn spending_over_any_window_stays_within_the_budget(
        config in (1..200u64, 0..200u64, 1..100u64).prop_map(|(s, b, r)| config(s, b, r)),
        steps in prop::collection::vec((0..20_000_000u64, 1..400u64), 1..40),
    ) {
        let (mut bucket, mut now) = (Bucket::new(&config, Duration::ZERO), 0u64);
        let mut spent = Vec::new();
        for (pause, tokens) in steps {
            now += pause;
            let at = Duration::from_nanos(now);
            if bucket.wait_for(tokens, at).is_none() {
                bucket.charge(tokens, at);
                spent.push((now, tokens));
            }
        }
        for (first, (from, _)) in spent.iter().enumerate() {
            let mut sum = 0u128;
            for (to, tokens) in &spent[first..] {
                let inflow = u128::from(to - from) * u128::from(config.size);
                let inflow = inflow.div_ceil(u128::from(config.refill_time_ms) * 1_000_000);
                let before = u128::from(config.one_time_burst) + u128::from(config.size) + inflow;
                sum += u128::from(*tokens);
                let over = u128::from(tokens.saturating_sub(config.size));
                prop_assert!(sum <= before + over, "{sum} in {} ns", to - from);
            }
        }
    }

    /// A refused request passes after exactly the time that it had to wait, and not before.
    #[test]
    fn refused_request_passes_when_its_wait_is_over(
        config in any_config(),
        spent in any::<u64>(),
        tokens in 1..=u64::MAX,
    ) {
        let mut bucket = Bucket::new(&config, Duration::ZERO);
        bucket.charge(spent, Duration::ZERO);
        if let Some(wait) = bucket.wait_for(tokens, Duration::ZERO) {
            prop_assert!(wait > Duration::ZERO);
            let just_before = wait - Duration::from_nanos(1);
            if wait < Duration::from_nanos(u64::MAX) {
                prop_assert!(bucket.clone().wait_for(tokens, just_before).is_some());
                prop_assert_eq!(bucket.wait_for(tokens, wait), None);
            }
        }
    }

    /// The number of calls in between changes nothing.
    #[test]
    fn questions_in_between_change_nothing(
        config in any_config(),
        asked in prop::collection::vec(0..1_000_000_000u64, 0..20),
        tokens in any::<u64>(),
    ) {
        let mut quiet = Bucket::new(&config, Duration::ZERO);
        quiet.charge(u64::MAX, Duration::ZERO);
        let mut busy = quiet.clone();
        let mut at = Duration::ZERO;
        for pause in asked {
            at += Duration::from_nanos(pause);
            busy.wait_for(tokens, at);
        }
        prop_assert_eq!(busy.wait_for(tokens, at), quiet.wait_for(tokens, at));
    }

    /// Neither huge numbers nor leaps of the clock, forward or back, overflow anything or give more
    /// than one bucket.
    #[test]
    fn extremes_and_leaps_of_the_clock_are_harmless(
        config in any_config(),
        steps in prop::collection::vec((any::<(u64, u32)>(), any::<u64>(), 0..3u8), 1..30),
    ) {
        let mut bucket = Bucket::new(&config, Duration::ZERO);
        for ((seconds, nanos), tokens, act) in steps {
            let now = Duration::new(seconds, nanos % 1_000_000_000);
            match act {
                0 => bucket.charge(tokens, now),
                1 => bucket.refund(tokens),
                _ => drop(bucket.wait_for(tokens, now)),
            }
        }
        // Far in the future there is exactly one bucket to spend, however long it had to fill.
        for _ in 0..3 { bucket.refund(u64::MAX); }
        let end = Duration::MAX;
        bucket.charge(u64::MAX, end);
        prop_assert!(bucket.wait_for(u64::MAX, end).is_some() || config.one_time_burst > 0
            || config.size == u64::MAX);
    }
}

#[test]
fn request_larger_than_the_bucket_passes_when_full_and_is_owed_for() {
    let ms = Duration::from_millis;
    let mut bucket = Bucket::new(&config(10, 0, 100), Duration::ZERO);
    assert_eq!(bucket.wait_for(35, ms(0)), None);
    bucket.charge(35, ms(0));
    // 25 owed and one wanted, at a token each 10 ms.
    assert_eq!(bucket.wait_for(1, ms(0)), Some(ms(260)));
    assert_eq!(bucket.wait_for(1, ms(259)), Some(ms(1)));
    assert_eq!(bucket.wait_for(1, ms(260)), None);
    // The next large one waits until the bucket is full.
    assert_eq!(bucket.wait_for(35, ms(260)), Some(ms(90)));
}

#[test]
fn one_time_burst_is_spent_first_and_never_comes_back() {
    let second = Duration::from_secs(1);
    let mut bucket = Bucket::new(&config(10, 90, 1000), Duration::ZERO);
    assert_eq!(bucket.wait_for(100, Duration::ZERO), None);
    bucket.charge(100, Duration::ZERO);
    assert_eq!(bucket.wait_for(10, Duration::ZERO), Some(second));
    bucket.charge(10, second);
    assert_eq!(bucket.wait_for(11, second * 100), None);
    bucket.charge(11, second * 100);
    assert_eq!(bucket.wait_for(10, second * 100), Some(second + second / 10));
}

#[test]
fn request_is_paid_from_both_buckets_or_from_none() {
    let mut limiter = limiter(Some(config(1000, 0, 3_600_000)), Some(config(2, 0, 3_600_000)));
    assert!(limiter.admit(Cost::op(100)) && limiter.admit(Cost::op(100)));
    // No operation is left, so no bytes are charged.
    assert!(!limiter.admit(Cost::op(800)));
    assert!(limiter.admit(Cost { bytes: 800, ops: 0 }));
    assert!(!limiter.admit(Cost { bytes: 1, ops: 0 }));
    limiter.refund(Cost::op(100));
    assert!(limiter.admit(Cost::op(100)));
}

#[test]
fn limiter_without_limits_admits_everything() {
    let mut limiter = limiter(None, None);
    assert!((0..1000).all(|_| limiter.admit(Cost::op(u64::MAX))));
    assert_eq!(limiter.take_wake(), None);
}

#[test]
fn limiter_says_when_the_request_may_pass() {
    let mut limiter = limiter(Some(config(100, 0, 50)), None);
    assert!(limiter.admit(Cost::op(100)));
    assert_eq!(limiter.take_wake(), None);
    assert!(!limiter.admit(Cost::op(100)));
    let wait = limiter.take_wake().unwrap() - Instant::now();
    assert!(wait > Duration::from_millis(10) && wait <= Duration::from_millis(50));
    assert_eq!(limiter.take_wake(), None);
    std::thread::sleep(wait);
    assert!(limiter.admit(Cost::op(100)));
}

#[test]
fn charge_after_the_fact_holds_the_next_request_back() {
    let mut limiter = limiter(Some(config(100, 0, 3_600_000)), None);
    limiter.charge(Cost::op(1000));
    assert!(!limiter.admit(Cost::op(1)));
    assert!(limiter.admit(Cost { bytes: 0, ops: 1 }));
    limiter.configure(&RateLimiterConfig::default());
    assert!(limiter.admit(Cost::op(1)));
}

#[test]
fn bucket_that_holds_nothing_or_never_fills_is_refused() {
    let check = |bucket| RateLimiterConfig { bytes: Some(bucket), ops: None }.validate();
    assert_eq!(check(config(0, 0, 1)), Err(RateLimiterError::Size { bucket: "bytes" }));
    for refill_time_ms in [0, REFILL_TIME_MS_MAX + 1, u64::MAX] {
        let expected = RateLimiterError::RefillTime { bucket: "bytes", refill_time_ms };
        assert_eq!(check(config(1, 0, refill_time_ms)), Err(expected));
    }
    assert_eq!(check(config(u64::MAX, u64::MAX, REFILL_TIME_MS_MAX)), Ok(()));
    assert_eq!(check(BucketConfig::per_second(1)), Ok(()));
    let ops = RateLimiterConfig { bytes: None, ops: Some(config(0, 0, 1)) };
    assert_eq!(ops.validate(), Err(RateLimiterError::Size { bucket: "ops" }));
    assert!(ops.is_limited() && !RateLimiterConfig::default().is_limited());
}
