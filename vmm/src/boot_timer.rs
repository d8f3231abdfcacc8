//! A page by which a guest says that it has booted, as Firecracker's guests know it.
//!
//! The guest writes one byte, and the log says how long it took from the order to boot.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pvmm_devices::bus::BusDevice;

use crate::sys;

/// How much of the guest's address space it takes.
pub const SIZE: u64 = 0x1000;
/// What a guest writes to the first byte.
const BOOTED: u8 = 123;

pub struct BootTimer {
    since: Instant,
    cpu_since: Duration,
    told: AtomicBool,
}

impl BootTimer {
    /// Counts from now on.
    pub fn start() -> Self {
        Self {
            since: Instant::now(),
            cpu_since: sys::process_cpu_time(),
            told: AtomicBool::new(false),
        }
    }
}

impl BusDevice for BootTimer {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        // Once: a guest boots once, and may not fill the log.
        if (offset, data) != (0, &[BOOTED]) || self.told.swap(true, Ordering::Relaxed) {
            return;
        }
        let wall = self.since.elapsed();
        let cpu = sys::process_cpu_time().saturating_sub(self.cpu_since);
        log::info!(
            "Guest-boot-time = {:>6} us {} ms, {:>6} CPU us {} CPU ms",
            wall.as_micros(),
            wall.as_millis(),
            cpu.as_micros(),
            cpu.as_millis()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_byte_that_says_so_counts() {
        let timer = BootTimer::start();
        for (offset, data) in [(1, &[BOOTED][..]), (0, &[1]), (0, &[BOOTED, 0]), (0, &[])] {
            timer.write(offset, data);
            assert!(!timer.told.load(Ordering::Relaxed), "{offset} {data:?}");
        }
        timer.write(0, &[BOOTED]);
        assert!(timer.told.load(Ordering::Relaxed));
    }
}
