//! The state that a snapshot keeps of a disk, in addition to its queues.
//!
//! The content of the disk is not part of it; it holds the properties by which a restore detects a
//! wrong disk.

use serde::{Deserialize, Serialize};

use super::config::BlockError;

/// The state of a disk at the time of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockStateV1 {
    pub capacity_sectors: u64,
    pub read_only: bool,
    pub id: String,
    /// A flush has failed, so all later flushes must fail too.
    pub flush_failed: bool,
}

impl BlockStateV1 {
    /// Refuses a disk whose size or access differs from what the guest saw.
    pub(super) fn check(&self, capacity_sectors: u64, read_only: bool) -> Result<(), BlockError> {
        if self.capacity_sectors != capacity_sectors {
            let (saved, here) = (self.capacity_sectors, capacity_sectors);
            return Err(BlockError::Capacity { saved, here });
        }
        if self.read_only != read_only {
            return Err(BlockError::Access { saved_read_only: self.read_only });
        }
        Ok(())
    }
}
