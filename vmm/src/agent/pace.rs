//! The least speed of a file transfer, listing or archive: 64 KiB a minute.
//!
//! Without it a guest that sends a byte now and then would block its reader forever.

use std::time::{Duration, Instant};

/// The longest time that the guest may take for [`LEAST`] bytes. Time that the host needs itself,
/// for example to write to a disk, is not counted.
const STALL: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 60 });
/// The bytes that must be transferred in [`STALL`].
const LEAST: u64 = 64 << 10;

/// The time that a transfer has waited for the guest since it last moved enough bytes.
#[derive(Debug, Default)]
pub(super) struct Pace {
    waited: Duration,
    moved: u64,
}

impl Pace {
    /// Calls `wait` with a deadline at which the guest has used up its time. `bytes` returns the
    /// number of bytes in what `wait` returned.
    pub fn wait<T, E>(
        &mut self,
        wait: impl FnOnce(Option<Instant>) -> Result<Option<T>, E>,
        bytes: impl FnOnce(&T) -> u64,
    ) -> Result<Option<T>, E> {
        let begun = Instant::now();
        let came = wait(Some(begun + STALL.saturating_sub(self.waited)))?;
        self.waited += begun.elapsed();
        self.moved = self.moved.saturating_add(came.as_ref().map_or(0, bytes));
        if self.moved >= LEAST {
            *self = Self::default();
        }
        Ok(came)
    }
}
