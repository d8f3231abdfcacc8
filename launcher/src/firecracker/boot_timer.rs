//! The register by which a guest of Firecracker reports that it has booted.
//!
//! The guest writes one byte, and the log says how long that took from the request to boot.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pvmm::{BusDevice, Registers};

use pvmm_sandbox::sys::process;

/// Where Firecracker's guests expect the register.
const ADDRESS: u64 = 0xc000_0000;
/// The byte that a guest writes when it has booted.
const BOOTED: u8 = 123;

pub struct BootTimer {
    since: Instant,
    cpu_since: Duration,
    reported: AtomicBool,
}

impl BootTimer {
    /// Returns a register that counts from now on.
    pub fn registers() -> Registers {
        Registers::new(ADDRESS, Arc::new(Self::start()))
    }

    fn start() -> Self {
        Self {
            since: Instant::now(),
            cpu_since: process::cpu_time(),
            reported: AtomicBool::new(false),
        }
    }
}

impl BusDevice for BootTimer {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        // Once: a guest boots once, and may not fill the log.
        if (offset, data) != (0, &[BOOTED]) || self.reported.swap(true, Ordering::Relaxed) {
            return;
        }
        let wall = self.since.elapsed();
        let cpu = process::cpu_time().saturating_sub(self.cpu_since);
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
            assert!(!timer.reported.load(Ordering::Relaxed), "{offset} {data:?}");
        }
        timer.write(0, &[BOOTED]);
        assert!(timer.reported.load(Ordering::Relaxed));
    }
}
