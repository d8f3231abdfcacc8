//! A machine that stands still: its state, its memory image and its disks, ready to be shared by
//! any number of machines.
//!
//! `freeze.rs` and `snapshot/` make it; `restore.rs`, `rollback.rs` and `snapshot/` use it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::kvm::vm::KvmHost;
use crate::memory::{MemoryImage, WorkingSet};
use crate::state::MachineState;
use crate::storage::FrozenStorage;

/// The snapshot that another one or a machine goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// The identifier in its manifest, 32 hexadecimal digits.
    pub id: String,
    /// The folder of the snapshot.
    pub dir: PathBuf,
    /// How many snapshots it takes to restore it.
    pub(crate) depth: usize,
}

/// A machine at one instant: the data of a [`crate::Template`] or of a checkpoint.
pub struct Frozen {
    pub host: Arc<KvmHost>,
    pub state: Arc<MachineState>,
    pub image: MemoryImage,
    pub drives: Vec<FrozenStorage>,
    /// The interfaces that the network cards were connected to.
    pub taps: Vec<String>,
    pub vsock_path: Option<PathBuf>,
    /// The snapshot whose memory the lowest layers of the image are.
    pub base: Option<Base>,
    /// The pages that a first use touches, recorded or guessed.
    pub working_set: Option<Arc<WorkingSet>>,
    /// The memory was left where it is; machines must get theirs from a page server.
    pub without_memory: bool,
    /// The note of the caller in the snapshot.
    pub note: Vec<u8>,
    /// The sums of the memory, if it came from two files.
    pub memory_sums: Option<Arc<[u32]>>,
    pub pause: Duration,
}
