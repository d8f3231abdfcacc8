//! Drives: what is attached before boot, and what may be changed later.

use serde::{Deserialize, Serialize};

use super::RateLimiter;

/// Whether the guest's flushes reach the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum CacheType {
    #[default]
    Unsafe,
    Writeback,
}

/// How the file is read and written.
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
    /// Of a device in another process, which is not supported.
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
