//! How a worker gets the driver's attention: used buffers, a changed configuration, or a plea for reset.
//!
//! The device thread raises, the vCPU threads read and acknowledge through the transport. Two atomics
//! and a line; no lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::Counters;
use crate::lines::Line;

/// Bit 0 of the interrupt status: the used ring of a queue has moved.
pub const USED_BUFFER: u32 = 1;
/// Bit 1: the configuration or the device status changed.
pub const CONFIG_CHANGE: u32 = 2;

/// A cheap handle to one device's interrupt line; clones share it.
#[derive(Clone, Debug)]
pub struct Interrupt {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    status: AtomicU32,
    needs_reset: AtomicBool,
    line: Line,
    counters: Arc<Counters>,
}

impl Interrupt {
    pub fn new(line: Line) -> Self {
        let (status, needs_reset) = (AtomicU32::new(0), AtomicBool::new(false));
        let counters = Arc::default();
        Self { shared: Arc::new(Shared { status, needs_reset, line, counters }) }
    }

    /// What this device has counted so far.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.shared.counters
    }

    /// Tells the driver that buffers came back.
    pub fn used_buffers(&self) {
        self.raise(USED_BUFFER);
    }

    /// Tells the driver to read the configuration again.
    pub fn config_changed(&self) {
        self.raise(CONFIG_CHANGE);
    }

    /// Tells the driver that the device gave up on it. True if the caller should log why: once per
    /// reset at most, and ever more rarely for a driver that does it again and again.
    pub fn needs_reset(&self) -> bool {
        let first = !self.shared.needs_reset.swap(true, Ordering::SeqCst);
        self.raise(CONFIG_CHANGE);
        first && self.shared.counters.add_fault()
    }

    /// Whether `needs_reset` was called since the last reset.
    pub fn is_reset_needed(&self) -> bool {
        self.shared.needs_reset.load(Ordering::SeqCst)
    }

    /// The interrupt status register.
    pub fn status(&self) -> u32 {
        self.shared.status.load(Ordering::SeqCst)
    }

    /// The driver has seen `bits`.
    pub fn acknowledge(&self, bits: u32) {
        self.shared.status.fetch_and(!bits, Ordering::SeqCst);
    }

    /// Back to the state after power-on.
    pub fn reset(&self) {
        self.shared.needs_reset.store(false, Ordering::SeqCst);
        self.shared.status.store(0, Ordering::SeqCst);
    }

    /// Puts a saved status back and raises the line again if anything was pending.
    pub fn restore(&self, status: u32, needs_reset: bool) {
        self.shared.needs_reset.store(needs_reset, Ordering::SeqCst);
        if status != 0 {
            self.raise(status & (USED_BUFFER | CONFIG_CHANGE));
        }
    }

    fn raise(&self, bits: u32) {
        self.shared.status.fetch_or(bits, Ordering::SeqCst);
        self.shared.line.raise();
    }
}
