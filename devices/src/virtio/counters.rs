//! Counters of one device about the driver that uses it.
//!
//! Guest errors end in the ring or in a request for a reset and are never returned to a caller;
//! these numbers report them to the host.

use std::sync::atomic::{AtomicU64, Ordering};

/// The counters that a transport, its queues and its worker share. They only increase.
#[derive(Debug, Default)]
pub struct Counters {
    served: AtomicU64,
    refused: AtomicU64,
    faults: AtomicU64,
}

/// The values of the counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterValues {
    /// Chains returned to the driver, whatever their outcome.
    pub served: u64,
    /// Requests answered with an error, or returned unused because they were malformed.
    pub refused: u64,
    /// Times the device gave up on its driver and asked for a reset.
    pub faults: u64,
}

impl Counters {
    pub fn add_served(&self) {
        self.served.fetch_add(1, Ordering::Relaxed);
    }

    pub fn add_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a fault and returns whether to log it: the first, second, fourth and so on, so that a
    /// guest that faults in a loop does not fill the log.
    pub fn add_fault(&self) -> bool {
        (self.faults.fetch_add(1, Ordering::Relaxed) + 1).is_power_of_two()
    }

    pub fn values(&self) -> CounterValues {
        CounterValues {
            served: self.served.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            faults: self.faults.load(Ordering::Relaxed),
        }
    }
}
