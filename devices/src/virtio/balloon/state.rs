//! The state that a snapshot keeps of a balloon, in addition to its queues.
//!
//! The list of given-up pages is the guest's and is in its memory.

use serde::{Deserialize, Serialize};

/// The state of a balloon at the time of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonStateV1 {
    pub limit_pages: u32,
    pub target_pages: u32,
    pub actual_pages: u32,
    pub hint_command: u32,
    pub hint_last: u32,
    pub deflate_on_oom: bool,
    pub free_page_reporting: bool,
    pub free_page_hinting: bool,
}

/// Why a saved balloon is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BalloonError {
    #[error("saved balloon has a hinting command, but was never offered hinting")]
    Hinting,
    #[error("saved balloon has a target of {target} pages, more than the {limit} that there are")]
    Target { target: u32, limit: u32 },
}

impl BalloonStateV1 {
    pub(super) fn check(&self) -> Result<(), BalloonError> {
        if self.target_pages > self.limit_pages {
            let (target, limit) = (self.target_pages, self.limit_pages);
            return Err(BalloonError::Target { target, limit });
        }
        if self.hint_command != 0 && !self.free_page_hinting {
            Err(BalloonError::Hinting)
        } else {
            Ok(())
        }
    }
}
