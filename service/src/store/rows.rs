//! The rows of the database.
//!
//! A field that a later version adds has a default, so that older rows can be read.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// The state of a sandbox as clients see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The VM runs.
    #[default]
    Running,
    /// The vCPUs stand still by request.
    Paused,
    /// The sandbox is a snapshot on disk, and wakes at the next request.
    Hibernated,
    /// The VM is gone, and no snapshot of it was left.
    Failed,
}

impl State {
    /// Returns the state in one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Hibernated => "hibernated",
            Self::Failed => "failed",
        }
    }
}

/// A volume in a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeUse {
    /// The name of the volume.
    pub name: String,
    /// The directory of the guest where it is mounted.
    pub at: String,
    /// Whether the guest cannot write to it.
    #[serde(default)]
    pub read_only: bool,
}

/// A sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SandboxRow {
    /// The id that clients use; it stays the same when the sandbox hibernates and wakes.
    pub id: String,
    /// The id of the VM that runs the sandbox now.
    pub vm: Option<String>,
    /// The template that it was made from.
    pub template: String,
    /// The number of vCPUs.
    pub cpus: u32,
    /// The guest memory in MiB.
    pub memory_mib: u64,
    /// Names and values of the client.
    pub metadata: BTreeMap<String, String>,
    /// The time to live that was asked for, in seconds.
    pub ttl_s: Option<u64>,
    /// When the sandbox ends, in milliseconds since 1970.
    pub expires_ms: Option<u64>,
    /// Whether it hibernates instead of ending.
    pub persistent: bool,
    /// The sandbox that it was forked from.
    pub parent: Option<String>,
    /// The fork tree that it belongs to.
    pub tree: Option<String>,
    /// The last state that was recorded.
    pub state: State,
    /// The prefix of the token that made it.
    pub owner: String,
    /// The volumes in it.
    pub volumes: Vec<VolumeUse>,
    /// Rules for the network; `None` if the sandbox has no network card.
    pub egress: Option<Vec<String>>,
    /// Names and values that its commands get, if its client gave some.
    pub env: BTreeMap<String, String>,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// When it was last used, as of the last write of the row.
    pub active_ms: u64,
    /// The snapshot that it was made from.
    pub from_snapshot: Option<String>,
    /// How long its start took.
    pub boot_ms: u64,
    /// How it was started: `fork`, `restore`, `boot`.
    pub boot_mode: String,
    /// Whether it has a checkpoint to roll back to.
    pub has_checkpoint: bool,
    /// Ports that need no token.
    pub public_ports: BTreeSet<u16>,
    /// Whether no port needs a token.
    pub all_public: bool,
}

impl SandboxRow {
    /// Returns whether a port can be reached without a token.
    pub fn is_public(&self, port: u16) -> bool {
        self.all_public || self.public_ports.contains(&port)
    }

    /// Returns whether a state of the sandbox stays usable while the sandbox goes on. A guest
    /// remembers what it has read of a volume, so an old state and a volume that was written since
    /// do not fit.
    pub fn may_keep_state(&self) -> bool {
        self.volumes.iter().all(|volume| volume.read_only)
    }
}

/// A snapshot; its folder has the same name as its id.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SnapshotRow {
    /// The id that clients use.
    pub id: String,
    /// The sandbox that it was taken of.
    pub sandbox: String,
    /// The template of that sandbox.
    pub template: String,
    /// The number of vCPUs.
    pub cpus: u32,
    /// The guest memory in MiB.
    pub memory_mib: u64,
    /// Whether it holds disks and no memory, and is booted.
    pub disk_only: bool,
    /// Rules for the network; `None` if the sandbox had no network card.
    pub egress: Option<Vec<String>>,
    /// The space that its folder takes on disk.
    pub bytes: u64,
    /// When it was taken, in milliseconds since 1970.
    pub created_ms: u64,
    /// The prefix of the token that took it.
    pub owner: String,
}

/// A bearer token. Only its digest is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenRow {
    /// The first characters, by which people tell tokens apart.
    pub prefix: String,
    /// The SHA-256 digest of the whole token.
    pub digest: Vec<u8>,
    /// The name that its maker gave it.
    pub label: String,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
    /// When it is no longer accepted, in milliseconds since 1970.
    pub expires_ms: Option<u64>,
}

/// A build of a template.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BuildRow {
    /// The id that clients use.
    pub id: String,
    /// The name of the template.
    pub name: String,
    /// One of `queued`, `running`, `done` and `failed`.
    pub status: String,
    /// The reason of a failed build.
    pub error: Option<String>,
    /// When it began, in milliseconds since 1970.
    pub started_ms: u64,
    /// When it ended, in milliseconds since 1970.
    pub ended_ms: Option<u64>,
    /// The size that the client asked for.
    pub size_mb: u64,
    /// The size of the image.
    pub bytes: u64,
}
