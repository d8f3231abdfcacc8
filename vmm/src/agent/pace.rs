//! How slow a guest may be with a file, a listing or an archive: a minute for each 64 KiB.
//! Without it a guest that sends a byte now and then would hold its reader for ever.

use std::time::{Duration, Instant};

/// How long a transfer may take over [`LEAST`] bytes because of the guest. Time that this end needs for
/// itself, to write to a disk, is not counted.
const STALL: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 60 });
/// What must move in that time.
const LEAST: u64 = 64 << 10;

/// What a transfer has waited for the guest since it last moved enough.
#[derive(Debug, Default)]
pub(super) struct Pace {
    waited: Duration,
    moved: u64,
}

impl Pace {
    /// Waits for the guest until it has used up its time; `wait` says what came and how many bytes it was.
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
