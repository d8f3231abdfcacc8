//! How a worker notifies the driver: used buffers, a changed configuration, or a request for a
//! reset.
//!
//! The device thread raises; the vCPU threads read and acknowledge through the transport. The state
//! is two atomics and an interrupt line, without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::Counters;
use crate::lines::Line;

/// Bit 0 of the interrupt status: the used ring of a queue has moved.
pub const USED_BUFFER: u32 = 1;
/// Bit 1 of the interrupt status: the configuration or the device status changed.
pub const CONFIG_CHANGE: u32 = 2;

/// A cheap handle to one device's interrupt. Clones share its state.
#[derive(Clone, Debug)]
pub struct Interrupt {
    shared: Arc<InterruptState>,
}

#[derive(Debug)]
struct InterruptState {
    status: AtomicU32,
    needs_reset: AtomicBool,
    line: Line,
    counters: Arc<Counters>,
}

impl Interrupt {
    pub fn new(line: Line) -> Self {
        let (status, needs_reset) = (AtomicU32::new(0), AtomicBool::new(false));
        let counters = Arc::default();
        Self { shared: Arc::new(InterruptState { status, needs_reset, line, counters }) }
    }

    /// Returns the counters of this device.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.shared.counters
    }

    /// Notifies the driver of used buffers.
    pub fn used_buffers(&self) {
        self.raise(USED_BUFFER);
    }

    /// Notifies the driver that the configuration changed.
    pub fn config_changed(&self) {
        self.raise(CONFIG_CHANGE);
    }

    /// Asks the driver for a reset because the device cannot continue. Returns true if the caller
    /// should log why: at most once per reset, and less and less often for a driver that causes it
    /// repeatedly.
    pub fn needs_reset(&self) -> bool {
        let first = !self.shared.needs_reset.swap(true, Ordering::SeqCst);
        self.raise(CONFIG_CHANGE);
        first && self.shared.counters.add_fault()
    }

    /// Returns whether `needs_reset` was called since the last reset.
    pub fn is_reset_needed(&self) -> bool {
        self.shared.needs_reset.load(Ordering::SeqCst)
    }

    /// Returns the interrupt status register.
    pub fn status(&self) -> u32 {
        self.shared.status.load(Ordering::SeqCst)
    }

    /// Clears the status bits that the driver acknowledges.
    pub fn acknowledge(&self, bits: u32) {
        self.shared.status.fetch_and(!bits, Ordering::SeqCst);
    }

    /// Sets the state after power-on.
    pub fn reset(&self) {
        self.shared.needs_reset.store(false, Ordering::SeqCst);
        self.shared.status.store(0, Ordering::SeqCst);
    }

    /// Restores a saved status and raises the line again if an interrupt was pending.
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
