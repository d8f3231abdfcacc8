//! Which blocks of a disk were written while somebody copies it.
//!
//! A disk that is written in place is copied while its guest runs; what the guest writes meanwhile is copied again once
//! it stands still.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::layers::{BLOCK, BlockMap};

/// The blocks that were written since the last look. Clones are the same list.
#[derive(Clone, Debug, Default)]
pub struct Changes(Arc<Mutex<BlockMap>>);

impl Changes {
    /// Notes bytes that have just been written or cleared. Noted earlier, they could be copied before they are written, and
    /// then not again.
    pub fn note(&self, bytes: Range<u64>) {
        self.lock().add(bytes.start / BLOCK..bytes.end.div_ceil(BLOCK));
    }

    /// The ranges of a disk of `size` bytes that were noted, which are then forgotten.
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
