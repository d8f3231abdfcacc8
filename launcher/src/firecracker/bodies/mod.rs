//! The JSON types of Firecracker's API: request and response bodies.
//!
//! A body has one struct for all its uses: in a request, in a configuration file, in `GET
//! /vm/config` and in the note of a snapshot. An unknown field is refused; an optional field may
//! also be null.

mod additions;
mod balloon;
mod config;
mod drive;
mod limits;
mod logging;
mod machine;
mod net;
mod snapshot;

use serde::{Deserialize, Deserializer};

pub use additions::{DriveOverride, Exec, Fork, ForkLoad, LoadWithDrives, Moment, RefreshBy};
pub use balloon::{Balloon, BalloonStats, BalloonUpdate, HintingStart, HintingStatus, StatsUpdate};
pub use config::Config;
pub use drive::{CacheType, Drive, DriveUpdate, IoEngine};
pub use limits::{RateLimiter, TokenBucket, config_of as limits_of};
pub use logging::{Level, Logger, Metrics, Serial};
pub use machine::{BootSource, CpuTemplate, HugePages, MachineConfig, MachineUpdate};
pub use net::{MmdsConfig, MmdsVersion, NetUpdate, NetworkInterface};
pub use snapshot::{
    BackendType, LoadHugePages, NetworkOverride, SnapshotCreate, SnapshotLoad, SnapshotType,
    VmState, VmUpdate, VsockOverride,
};

/// `PUT /actions`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum ActionType {
    FlushMetrics,
    InstanceStart,
    SendCtrlAltDel,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Action {
    pub action_type: ActionType,
}

/// `PUT /vsock`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct Vsock {
    /// Deprecated and ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vsock_id: Option<String>,
    pub guest_cid: u32,
    pub uds_path: String,
}

/// `PUT /entropy`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct Entropy {
    #[serde(default)]
    pub rate_limiter: Option<RateLimiter>,
}

/// Deserializes an optional field; an absent or null one gets its default value.
fn or_default<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::<T>::deserialize(from).map(Option::unwrap_or_default)
}
