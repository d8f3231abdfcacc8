//! Request bodies of pvmm's own API under `/pvmm/`: drives at load, forks, commands in the guest.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{NetworkOverride, SnapshotLoad, VsockOverride, or_default};

/// Replaces the image behind a drive of the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DriveOverride {
    pub drive_id: String,
    pub path_on_host: String,
}

/// `PUT /pvmm/snapshot/load`: Firecracker's load request, with drive overrides.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadWithDrives {
    pub load: SnapshotLoad,
    #[serde(default, deserialize_with = "or_default")]
    pub drive_overrides: Vec<DriveOverride>,
}

/// Who refreshes a restored or forked VM before its workload continues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RefreshBy {
    /// The agent in the guest; if it does not answer, the request fails.
    #[default]
    Agent,
    /// No one, or the client itself.
    None,
}

/// `PUT /pvmm/checkpoint` and `PUT /pvmm/rollback`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moment {
    #[serde(default, deserialize_with = "or_default")]
    pub refresh: RefreshBy,
}

/// `PUT /pvmm/fork`: freeze the VM for a moment, and serve its state to children on a socket.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    pub socket: PathBuf,
    /// The most children that may connect; 1 by default.
    #[serde(default)]
    pub children: Option<u32>,
    #[serde(default, deserialize_with = "or_default")]
    pub refresh: RefreshBy,
}

/// `PUT /pvmm/fork/load`: continue from the state that another process has frozen.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForkLoad {
    pub socket: PathBuf,
    #[serde(default, deserialize_with = "or_default")]
    pub resume_vm: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub refresh: RefreshBy,
    #[serde(default, deserialize_with = "or_default")]
    pub network_overrides: Vec<NetworkOverride>,
    #[serde(default)]
    pub vsock_override: Option<VsockOverride>,
    #[serde(default, deserialize_with = "or_default")]
    pub drive_overrides: Vec<DriveOverride>,
}

/// `PUT /pvmm/exec`: run a command through the agent, given as `argv` or as a line for the shell.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exec {
    #[serde(default)]
    pub argv: Option<Vec<String>>,
    #[serde(default)]
    pub shell: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub cwd: Option<String>,
    #[serde(default)]
    pub user: Option<String>,
    #[serde(default)]
    pub stdin: Option<String>,
    /// One minute by default.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
}
