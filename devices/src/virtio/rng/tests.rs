//! The source of randomness from a driver's side.

use vm_memory::{Address, Bytes};

use super::super::mmio::RING_EVENT_IDX;
use super::super::testing::Buffer::{Readable, Writable};
use super::super::testing::MockDriver;
use super::super::{conformance, registry::DeviceState};
use super::{Rng, RngConfig};
use crate::rate_limiter::{BucketConfig, RateLimiterConfig};

struct Source;

impl conformance::Specimen for Source {
    type Device = Rng;
    const QUEUE: usize = 0;

    fn fresh(&self) -> Rng {
        Rng::default()
    }

    fn restored(&self, state: &DeviceState) -> Rng {
        assert!(matches!(state, DeviceState::Rng(_)));
        Rng::default()
    }

    fn exercise(&self, driver: &mut MockDriver) {
        let (used, bytes) = driver.request(0, &[Writable(32)]);
        assert_eq!(used.unwrap().len, 32);
        assert_ne!(bytes, [[0; 32]]);
    }
}

conformance::suite!(Source);

#[test]
fn request_for_bytes_fills_the_whole_buffer_with_other_bytes_each_time() {
    let mut driver = MockDriver::ready(Rng::default());
    let (used, first) = driver.request(0, &[Writable(64)]);
    assert_eq!(used.unwrap().len, 64);
    let (_, second) = driver.request(0, &[Writable(64)]);
    assert_ne!(first, second);
    assert_ne!(first, [vec![0; 64]]);
}

#[test]
fn request_beyond_the_cap_is_filled_up_to_the_cap() {
    let mut driver = MockDriver::ready(Rng::default());
    let (used, bytes) = driver.request(0, &[Writable(40 << 10), Writable(40 << 10)]);
    assert_eq!(used.unwrap().len, 64 << 10);
    assert_eq!(bytes[1][24 << 10..], [0; 16 << 10]);
    let mut driver = MockDriver::ready(Rng::new(RngConfig::default().request_bytes(16)).unwrap());
    assert_eq!(driver.request(0, &[Writable(64)]).0.unwrap().len, 16);
}

#[test]
fn a10_request_without_writable_buffer_is_refused_and_counted() {
    let mut driver = MockDriver::ready(Rng::default());
    let (used, bytes) = driver.request(0, &[Readable(&[5; 64])]);
    assert_eq!(used.unwrap().len, 0);
    assert_eq!(bytes, [vec![5; 64]]);
    assert_eq!(driver.transport.counters().refused, 1);
    assert!(!driver.needs_reset());
}

#[test]
fn request_beyond_the_limit_waits_until_the_bucket_has_filled() {
    let bytes = BucketConfig { size: 64, one_time_burst: 0, refill_time_ms: 300 };
    let limits = RateLimiterConfig { bytes: Some(bytes), ops: None };
    let mut driver = MockDriver::ready(Rng::new(RngConfig::default().limits(limits)).unwrap());
    let begun = std::time::Instant::now();
    assert_eq!(driver.request(0, &[Writable(64)]).0.unwrap().len, 64);
    let mut second = driver.request(0, &[Writable(64)]).0;
    while second.is_none() && begun.elapsed().as_secs() < 5 {
        driver.devices.wait(5000);
        second = driver.used(0);
    }
    assert_eq!(second.unwrap().len, 64);
    assert!((300..5000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
}

/// Runs with and without event indices.
#[test]
fn resume_leaves_a_queue_alone_that_waits_for_its_driver_and_no_other() {
    for left_out in [0, RING_EVENT_IDX] {
        let mut driver = MockDriver::new(Rng::default());
        driver.start_with(driver.offered() & !left_out);
        assert_eq!(driver.request(0, &[Writable(8)]).0.unwrap().len, 8);
        let pause = |driver: &MockDriver| {
            let devices = driver.devices.handle();
            devices.quiesce_all().unwrap();
            devices.resume_all().unwrap();
            driver.devices.run(9)
        };
        assert_eq!(pause(&driver), 0);
        // As left by a worker that was stopped before it could ask for kicks again.
        let flags = driver.used_ring(0);
        let kick_at = flags.unchecked_add(4 + 8 * 256);
        let (off, asked) = if left_out == 0 { (kick_at, 1u16) } else { (flags, 0) };
        driver.memory.write_obj(1 - asked, off).unwrap();
        assert_ne!(pause(&driver), 0);
        assert_eq!(driver.memory.read_obj::<u16>(off).unwrap(), asked);
        driver.offer(0, 0);
        assert_ne!(pause(&driver), 0);
        assert!(driver.used(0).is_some());
    }
}
