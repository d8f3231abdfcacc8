//! The host's configuration of the source of randomness. The guest has no configuration space to
//! read.

use crate::rate_limiter::{RateLimiterConfig, RateLimiterError};

/// The maximum number of bytes of one request, whatever its buffers hold.
const REQUEST_BYTES_MAX: u32 = 64 << 10;

/// The host's configuration of a source of randomness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RngConfig {
    request_bytes: u32,
    pub(super) limits: RateLimiterConfig,
}

impl RngConfig {
    /// Sets the maximum number of bytes that one request gets, between 1 byte and 64 KiB.
    #[must_use]
    pub fn request_bytes(mut self, bytes: u32) -> Self {
        self.request_bytes = bytes.clamp(1, REQUEST_BYTES_MAX);
        self
    }

    #[must_use]
    pub fn limits(mut self, limits: RateLimiterConfig) -> Self {
        self.limits = limits;
        self
    }

    pub fn validate(&self) -> Result<(), RateLimiterError> {
        self.limits.validate()
    }

    pub(super) fn cap(self) -> u32 {
        self.request_bytes
    }
}

impl Default for RngConfig {
    fn default() -> Self {
        Self { request_bytes: REQUEST_BYTES_MAX, limits: RateLimiterConfig::default() }
    }
}
