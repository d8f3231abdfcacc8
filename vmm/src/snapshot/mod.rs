//! A template in a folder: `manifest.json`, `state.bin`, `memory.bin`, a file for each of the guest's disks, and perhaps
//! `sibling.bin`, which only saves memory: what a machine had changed after its first use.
//!
//! | file | what it answers |
//! | --- | --- |
//! | `manifest.rs` | what a folder says of itself, readable without decoding anything |
//! | `sections.rs` | how a machine's registers are kept, each part with its version |
//! | `checksum.rs` | whether a large file is still the one that was written |
//! | `fill.rs` | how a large file is written and summed up in one pass |
//! | `host.rs` | whether this host can go on with it |
//! | `outside.rs` | which files beside the folder it may name, and how they are opened |
//! | `signature.rs` | whether a holder of a key has written it |
//! | `write.rs` | how a folder comes to be, whole or not at all |
//! | `files.rs` | the same as two files of the caller's naming, as Firecracker's clients know it |
//! | `written_file.rs` | how one file comes to be, whole or not at all |
//! | `edit.rs` | what such a pair says, and how a memory file is brought up to date |
//! | `handover.rs` | how a template goes to another process without a folder |
//! | `read.rs` | how a folder becomes a template again, or is refused by name |
//!
//! Files are untrusted: every length, count and offset is checked before it is used, and nothing is mapped
//! before all of it was.

mod checksum;
mod edit;
mod files;
mod fill;
mod handover;
mod host;
mod manifest;
mod outside;
mod read;
mod sections;
mod signature;
pub(crate) mod state;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod write;
mod written_file;

use std::io;
use std::path::PathBuf;

pub use edit::{StateText, rebase};
pub use files::{NOTE_MAX, SaveKind, StateFile};
pub use manifest::{DiskFacts, MachineFacts, Manifest, MemoryFacts};
pub use outside::{Roots, is_allowed};
pub use read::LoadOptions;
pub use signature::Key;
pub use write::{Durability, WriteOptions};

use crate::error::{Error, ErrorKind};

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const STATE: &str = "state.bin";
pub(crate) const MEMORY: &str = "memory.bin";
pub(crate) const SIBLING: &str = "sibling.bin";
/// Which files were compared with their checksums, and how they looked then.
pub(crate) const STAMP: &str = "verified";

/// The most that is read of each small file.
pub(crate) const MANIFEST_MAX: u64 = 1 << 20;
pub(crate) const STATE_MAX: u64 = 10 << 20;
/// The longest chain of snapshots, each holding what changed since the one before.
pub(crate) const CHAIN_MAX: usize = 12;

/// The snapshot that another one or a machine goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    pub id: String,
    pub dir: PathBuf,
    /// How many snapshots it takes to restore it.
    pub(crate) depth: usize,
}

/// Why a folder is not a snapshot that can be used.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("{file}: cannot be read")]
    Read { file: String, source: io::Error },
    #[error("{file}: is not a regular file of its own")]
    Kind { file: String },
    #[error("{file}: is {size} bytes, more than {max}")]
    TooBig { file: String, size: u64, max: u64 },
    #[error("{file}: is {size} bytes, the manifest says {expected}")]
    Size { file: String, size: u64, expected: u64 },
    #[error("manifest.json: {0}")]
    Manifest(String),
    #[error("format version {found} is not one that this pvmm reads ({known})")]
    Version { found: u32, known: u32 },
    #[error("state.bin: {0}")]
    State(String),
    #[error("state.bin: section {kind} has version {version}, which this pvmm does not read")]
    SectionVersion { kind: String, version: u32 },
    #[error("{file}: differs from what was written, at byte {offset}")]
    Checksum { file: String, offset: u64 },
    #[error(
        "{what} is {found} there and {here} here; restore it on a host like its own, or make it again on this one"
    )]
    Host { what: &'static str, found: String, here: String },
    #[error(
        "the clock rate is {found} kHz there and {here} kHz here, and this KVM cannot scale it \
         (KVM_CAP_TSC_CONTROL); restore it on a host of that rate, or make it again on this one"
    )]
    ClockRate { found: u32, here: u32 },
    #[error("base snapshot {dir}: {reason}")]
    Base { dir: String, reason: String },
    #[error("drive {index}: {path} is not the file it was; give another with an override")]
    Drive { index: usize, path: String },
    #[error(
        "drive {index}: {path} is in no folder that a snapshot may name files of; allow its folder, or give \
         another drive with an override"
    )]
    DriveRoot { index: usize, path: String },
    #[error("key: {0}")]
    Key(String),
    #[error("signature: {0}; this is not a snapshot that a holder of the key has written")]
    Signature(String),
    #[error(
        "drive {index}: is the machine's own and has no path; two files hold no disk, write a folder"
    )]
    OwnDisk { index: usize },
    #[error(
        "drive {index}: is opened when the machine runs; resume it once before it is written as a folder"
    )]
    NotOpened { index: usize },
    #[error(
        "{path}: is a snapshot of Firecracker; bake it again with this pvmm, or load it with the VMM that made it"
    )]
    Foreign { path: String },
    #[error(
        "{path}: is a folder; give the state file of a snapshot, or restore the folder with pvmm restore"
    )]
    Folder { path: String },
    #[error("{path}: is the state file of a snapshot of two files, not of a folder")]
    TwoFiles { path: String },
    #[error("{file}: is {size} bytes, the machine has {expected} bytes of memory")]
    MemorySize { file: String, size: u64, expected: u64 },
    #[error(
        "{memory}: is not the memory that {state} was saved with; is it a diff that must be merged first?"
    )]
    Mixed { memory: String, state: String },
    #[error("{file}: {source}")]
    Of { file: String, source: Box<SnapshotError> },
    #[error("{dir}: exists already")]
    Exists { dir: String },
    #[error("cannot write {file}")]
    Write { file: String, source: io::Error },
}

impl SnapshotError {
    /// The same, with the name of the file that the caller knows.
    fn of_file(self, file: &str) -> Self {
        Self::Of { file: file.to_owned(), source: Box::new(self) }
    }

    fn kind(&self) -> ErrorKind {
        match self {
            SnapshotError::Of { source, .. } => source.kind(),
            SnapshotError::Foreign { .. } => ErrorKind::SnapshotIncompatible,
            SnapshotError::OwnDisk { .. }
            | SnapshotError::NotOpened { .. }
            | SnapshotError::Folder { .. }
            | SnapshotError::Key(_)
            | SnapshotError::DriveRoot { .. }
            | SnapshotError::TwoFiles { .. } => ErrorKind::InvalidConfig,
            SnapshotError::Version { .. }
            | SnapshotError::SectionVersion { .. }
            | SnapshotError::Drive { .. }
            | SnapshotError::ClockRate { .. }
            | SnapshotError::Host { .. } => ErrorKind::SnapshotIncompatible,
            SnapshotError::Exists { .. } => ErrorKind::InvalidConfig,
            SnapshotError::Write { .. } => ErrorKind::HostResource,
            SnapshotError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                ErrorKind::InvalidConfig
            }
            _ => ErrorKind::SnapshotCorrupt,
        }
    }
}

impl From<SnapshotError> for Error {
    fn from(error: SnapshotError) -> Self {
        Self::new(error.kind(), "snapshot", error)
    }
}

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod files_crash_tests;
#[cfg(test)]
mod files_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trust_tests;
