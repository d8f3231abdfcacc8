//! The blocks of a disk that were written while it is being copied.
//!
//! A disk that is written in place is copied while its guest runs; the blocks that the guest writes
//! meanwhile are copied again once it is paused.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::layers::{BLOCK, BlockMap};

/// The blocks written since the last `take`. Clones share one list.
#[derive(Clone, Debug, Default)]
pub struct Changes(Arc<Mutex<BlockMap>>);

impl Changes {
    /// Records bytes that have just been written or cleared. If they were recorded before the
    /// write, they could be taken and copied before it and then not again.
    pub fn note(&self, bytes: Range<u64>) {
        self.lock().add(bytes.start / BLOCK..bytes.end.div_ceil(BLOCK));
    }

    /// Takes the recorded ranges of a disk of `size` bytes and clears the list.
    pub fn take(&self, size: u64) -> Vec<Range<u64>> {
        let noted = std::mem::take(&mut *self.lock());
        let within = |range: Range<u64>| range.start.min(size)..range.end.min(size);
        noted.ranges(u64::MAX).into_iter().map(within).filter(|range| !range.is_empty()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BlockMap> {
        // A panic while locked would leave plain bits.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
