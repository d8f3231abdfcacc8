//! A token bucket, for what a guest can cause and the host pays for.

use std::time::{Duration, Instant};

/// A number of acts per second, with a burst.
#[derive(Clone, Debug)]
pub struct Bucket {
    burst: f64,
    per_second: f64,
    tokens: f64,
    last: Instant,
}

impl Bucket {
    pub fn new(per_second: u32, burst: u32, now: Instant) -> Self {
        let burst = f64::from(burst);
        Self { burst, per_second: per_second.into(), tokens: burst, last: now }
    }

    /// Takes a token. Returns false if there is none.
    pub fn take(&mut self, now: Instant) -> bool {
        let passed: Duration = now.saturating_duration_since(self.last);
        self.last = now;
        self.tokens = self.burst.min(self.tokens + passed.as_secs_f64() * self.per_second);
        if self.tokens < 1.0 {
            return false;
        }
        self.tokens -= 1.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_allows_its_burst_and_then_its_rate() {
        let start = Instant::now();
        let mut bucket = Bucket::new(10, 5, start);
        assert_eq!((0..20).filter(|_| bucket.take(start)).count(), 5);
        let later = start + Duration::from_millis(200);
        assert_eq!((0..20).filter(|_| bucket.take(later)).count(), 2);
        let much_later = start + Duration::from_secs(3600);
        assert_eq!((0..20).filter(|_| bucket.take(much_later)).count(), 5);
    }
}
