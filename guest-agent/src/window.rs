//! Credit windows: how many bytes may still be sent on a channel, and when more are granted.
//!
//! Both ends count with this code, so that a slow stream never blocks another.

use crate::limits::MAX_WINDOW;

/// A peer broke the rules of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    #[error("{sent} bytes came where {left} were allowed")]
    Overrun { sent: usize, left: u32 },
    #[error("a grant of {grant} bytes lifts a window of {left} above {MAX_WINDOW}")]
    Overflow { grant: u32, left: u32 },
}

/// The sender's side of a window.
#[derive(Debug, Clone, Copy)]
pub struct SendWindow {
    left: u32,
}

impl SendWindow {
    pub fn new(initial: u32) -> Self {
        Self { left: initial }
    }

    /// Returns the number of bytes that may be sent now.
    pub fn left(&self) -> usize {
        self.left as usize
    }

    /// Accounts for sent bytes; the caller must not exceed `left`.
    pub fn sent(&mut self, bytes: usize) {
        self.left = self.left.saturating_sub(bytes as u32);
    }

    /// Adds a grant from the receiver.
    pub fn grant(&mut self, bytes: u32) -> Result<(), WindowError> {
        match self.left.checked_add(bytes) {
            Some(sum) if sum <= MAX_WINDOW => self.left = sum,
            _ => return Err(WindowError::Overflow { grant: bytes, left: self.left }),
        }
        Ok(())
    }
}

/// The receiver's side of a window.
#[derive(Debug, Clone, Copy)]
pub struct ReceiveWindow {
    size: u32,
    /// The size after the first grant.
    grown: u32,
    left: u32,
    owed: u32,
}

impl ReceiveWindow {
    pub fn new(initial: u32) -> Self {
        Self { size: initial, grown: initial, left: initial, owed: 0 }
    }

    /// Lets the first grant enlarge the window to `size`: a sender of little never needs it.
    pub fn grow_to(&mut self, size: u32) {
        self.grown = size.max(self.size);
    }

    /// Accounts for received bytes.
    pub fn received(&mut self, bytes: usize) -> Result<(), WindowError> {
        if bytes > self.left as usize {
            return Err(WindowError::Overrun { sent: bytes, left: self.left });
        }
        self.left -= bytes as u32;
        Ok(())
    }

    /// Accounts for consumed bytes; returns the bytes to grant once that is worth a frame.
    pub fn consumed(&mut self, bytes: usize) -> Option<u32> {
        self.owed += bytes as u32;
        if self.owed < self.size / 2 {
            return None;
        }
        let grant = std::mem::take(&mut self.owed) + (self.grown - self.size);
        self.size = self.grown;
        self.left += grant;
        Some(grant)
    }
}
