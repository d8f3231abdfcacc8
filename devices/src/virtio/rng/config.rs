//! What the host asks of the source of randomness.
//!
//! There is one setting, and the guest reads no configuration space at all.

/// How much one request may take at most, whatever buffers it brings.
const REQUEST_BYTES_MAX: u32 = 64 << 10;

/// A source of randomness as the host wishes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RngConfig {
    request_bytes: u32,
}

impl RngConfig {
    /// Lowers the most bytes that one request gets; never more than 64 KiB, never none.
    #[must_use]
    pub fn request_bytes(mut self, bytes: u32) -> Self {
        self.request_bytes = bytes.clamp(1, REQUEST_BYTES_MAX);
        self
    }

    pub(super) fn cap(self) -> u32 {
        self.request_bytes
    }
}

impl Default for RngConfig {
    fn default() -> Self {
        Self { request_bytes: REQUEST_BYTES_MAX }
    }
}
