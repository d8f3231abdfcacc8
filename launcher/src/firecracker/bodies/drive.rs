//! Drives: configuration before boot, and updates of a running VM.

use serde::{Deserialize, Serialize};

use super::RateLimiter;

/// Whether the guest's flush requests reach the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum CacheType {
    #[default]
    Unsafe,
    Writeback,
}

/// The I/O engine that reads and writes the image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum IoEngine {
    #[default]
    Sync,
    Async,
}

/// `PUT /drives/{drive_id}`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Drive {
    pub drive_id: String,
    #[serde(default)]
    pub partuuid: Option<String>,
    pub is_root_device: bool,
    #[serde(default, deserialize_with = "super::or_default")]
    pub cache_type: CacheType,
    #[serde(default)]
    pub is_read_only: Option<bool>,
    #[serde(default)]
    pub path_on_host: Option<String>,
    #[serde(default)]
    pub rate_limiter: Option<RateLimiter>,
    #[serde(default)]
    pub io_engine: Option<IoEngine>,
    /// Socket of a vhost-user backend, which is not supported.
    #[serde(default)]
    pub socket: Option<String>,
}

impl Drive {
    pub fn read_only(&self) -> bool {
        self.is_read_only.unwrap_or(false)
    }
}

/// `PATCH /drives/{drive_id}`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveUpdate {
    pub drive_id: String,
    #[serde(default)]
    pub path_on_host: Option<String>,
    #[serde(default)]
    pub rate_limiter: Option<RateLimiter>,
}
