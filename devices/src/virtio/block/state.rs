//! What a snapshot keeps of a disk, beyond its queues.
//!
//! The content of a disk is not here; these are the facts by which a restore notices a wrong one.

use serde::{Deserialize, Serialize};

use super::config::BlockError;

/// A disk at the moment of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockStateV1 {
    pub capacity_sectors: u64,
    pub read_only: bool,
    pub id: String,
    /// A flush has failed, so the guest must not believe in later ones.
    pub flush_failed: bool,
}

impl BlockStateV1 {
    /// Refuses a disk that the guest would not recognise.
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
