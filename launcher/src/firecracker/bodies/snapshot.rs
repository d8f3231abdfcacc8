//! Snapshots: creating, loading, and the run state of a VM.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::or_default;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum SnapshotType {
    Diff,
    #[default]
    Full,
}

/// `PUT /snapshot/create`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotCreate {
    #[serde(default, deserialize_with = "or_default")]
    pub snapshot_type: SnapshotType,
    pub snapshot_path: PathBuf,
    pub mem_file_path: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum BackendType {
    File,
    Uffd,
}

/// The source of guest memory: a file, or a page server that listens on a socket.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemBackend {
    pub backend_path: PathBuf,
    pub backend_type: BackendType,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkOverride {
    pub iface_id: String,
    pub host_dev_name: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct VsockOverride {
    pub uds_path: String,
}

/// How the host backs the loaded VM's memory: a hint that the guest cannot see.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum LoadHugePages {
    #[default]
    Snapshot,
    None,
    Transparent,
    #[serde(rename = "2M")]
    Hugetlbfs2M,
}

/// `PUT /snapshot/load`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotLoad {
    pub snapshot_path: PathBuf,
    #[serde(default)]
    pub mem_file_path: Option<PathBuf>,
    #[serde(default)]
    pub mem_backend: Option<MemBackend>,
    #[serde(default, deserialize_with = "or_default")]
    pub enable_diff_snapshots: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub track_dirty_pages: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub resume_vm: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub network_overrides: Vec<NetworkOverride>,
    #[serde(default)]
    pub vsock_override: Option<VsockOverride>,
    #[serde(default, deserialize_with = "or_default")]
    pub clock_realtime: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub huge_pages: LoadHugePages,
}

impl SnapshotLoad {
    /// Returns the single source of guest memory; fails if the request names none or two.
    pub fn memory(&self) -> Result<MemBackend, &'static str> {
        match (&self.mem_backend, &self.mem_file_path) {
            (Some(_), Some(_)) => Err(
                "too many fields: either `mem_backend` or `mem_file_path` exclusively is required",
            ),
            (None, None) => {
                Err("missing field: either `mem_backend` or `mem_file_path` is required")
            }
            (Some(backend), None) => Ok(backend.clone()),
            (None, Some(path)) => {
                Ok(MemBackend { backend_path: path.clone(), backend_type: BackendType::File })
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum VmState {
    Paused,
    Resumed,
}

/// `PATCH /vm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmUpdate {
    pub state: VmState,
}
