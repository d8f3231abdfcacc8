//! Snapshots on disk: a template as a folder, or as two files that the caller names.
//!
//! A folder holds `manifest.json`, `state.bin`, `memory.bin`, one file for each disk of the guest,
//! and optionally `sibling.bin`: the pages that another VM of the template had changed after its
//! first use. `sibling.bin` is used for page dedup only. A folder of disks alone has no
//! `memory.bin` and no registers; a VM is booted with them.
//!
//! | file | contents |
//! | --- | --- |
//! | `manifest.rs` | the manifest, readable without decoding anything else |
//! | `sections.rs` | the encoding of the VM's registers, in versioned sections |
//! | `checksum.rs` | checksums that detect a changed large file |
//! | `fill.rs` | writing and checksumming a large file in one pass |
//! | `host.rs` | the check that this host can run the VM |
//! | `outside.rs` | files outside of the folder that a snapshot may name, and how they are opened |
//! | `signature.rs` | the proof that a holder of a key has written the snapshot |
//! | `write.rs` | writing a folder, whole or not at all |
//! | `files.rs` | a snapshot as two files, as Firecracker's clients use it |
//! | `working_set_file.rs` | the working set that a snapshot of two files learns |
//! | `written_file.rs` | writing one file, whole or not at all |
//! | `edit.rs` | describing a state file, and merging a diff into a memory file |
//! | `handover.rs` | passing a template to another process without a folder |
//! | `disks.rs` | opening a folder of disks alone |
//! | `portable.rs` | a folder for another host, with the files that it only names |
//! | `read.rs` | loading a folder as a template, or refusing it with a named error |
//!
//! Files are untrusted: every length, count and offset is checked before it is used, and nothing is
//! mapped before all checks have passed.

mod checksum;
mod disks;
mod edit;
mod files;
mod fill;
mod handover;
mod host;
mod manifest;
mod outside;
mod portable;
mod read;
mod sections;
mod signature;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod working_set_file;
mod write;
mod written_file;

use std::io;

pub use disks::{Disk, Disks};
pub use edit::{StateText, rebase};
pub use files::{NOTE_MAX, SaveKind, StateFile};
pub(crate) use files::{load_files, save_files};
pub(crate) use handover::{hand_over, take_over};
pub use manifest::{DiskFacts, MachineFacts, Manifest, MemoryFacts, SnapshotKind};
pub use outside::{Roots, is_allowed};
pub use portable::{PortableContent, PortableFile, portable_files, settle_portable};
pub use read::LoadOptions;
pub(crate) use read::load;
pub use signature::Key;
pub(crate) use working_set_file::{read as read_working_set, write as write_working_set};
pub(crate) use write::write;
pub use write::{Durability, WriteOptions};

pub use crate::frozen::Base;

use crate::cpu::CpuError;
use crate::error::{Error, ErrorKind};
use crate::storage::MissingDrive;

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const STATE: &str = "state.bin";
pub(crate) const MEMORY: &str = "memory.bin";
pub(crate) const SIBLING: &str = "sibling.bin";
/// The file that records which files were compared with their checksums, and their stamps.
pub(crate) const STAMP: &str = "verified";

/// The largest accepted size of each small file.
pub(crate) const MANIFEST_MAX: u64 = 1 << 20;
pub(crate) const STATE_MAX: u64 = 10 << 20;
/// The longest chain of snapshots, each holding the changes since its base.
pub(crate) const CHAIN_MAX: usize = 12;

/// Reasons why a snapshot cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // each variant's message says what it is
#[non_exhaustive]
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
    #[error(transparent)]
    Baseline(CpuError),
    #[error("base snapshot {dir}: {reason}")]
    Base { dir: String, reason: String },
    #[error(transparent)]
    Drive(#[from] MissingDrive),
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
    #[error("{dir}: holds disks and no memory; boot a VM with them: pvmm restore")]
    NoMemory { dir: String },
    #[error("{dir}: holds memory and registers; a VM goes on from it and is not booted")]
    HasMemory { dir: String },
    #[error("{dir}: exists already")]
    Exists { dir: String },
    #[error("cannot write {file}")]
    Write { file: String, source: io::Error },
}

impl SnapshotError {
    /// Wraps the error with the name of the file that the caller gave.
    fn of_file(self, file: &str) -> Self {
        Self::Of { file: file.to_owned(), source: Box::new(self) }
    }

    fn kind(&self) -> ErrorKind {
        match self {
            SnapshotError::Of { source, .. } => source.kind(),
            SnapshotError::Foreign { .. } => ErrorKind::SnapshotIncompatible,
            SnapshotError::NoMemory { .. }
            | SnapshotError::HasMemory { .. }
            | SnapshotError::OwnDisk { .. }
            | SnapshotError::NotOpened { .. }
            | SnapshotError::Folder { .. }
            | SnapshotError::Key(_)
            | SnapshotError::Drive(MissingDrive::NotAllowed { .. })
            | SnapshotError::TwoFiles { .. } => ErrorKind::InvalidConfig,
            SnapshotError::Version { .. }
            | SnapshotError::SectionVersion { .. }
            | SnapshotError::Drive(MissingDrive::Changed { .. })
            | SnapshotError::ClockRate { .. }
            | SnapshotError::Baseline(_)
            | SnapshotError::Host { .. } => ErrorKind::SnapshotIncompatible,
            SnapshotError::Exists { .. } => ErrorKind::InvalidConfig,
            SnapshotError::Write { .. } => ErrorKind::HostResource,
            SnapshotError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                ErrorKind::InvalidConfig
            }
            SnapshotError::Read { .. }
            | SnapshotError::Kind { .. }
            | SnapshotError::TooBig { .. }
            | SnapshotError::Size { .. }
            | SnapshotError::Manifest(_)
            | SnapshotError::State(_)
            | SnapshotError::Checksum { .. }
            | SnapshotError::Base { .. }
            | SnapshotError::Signature(_)
            | SnapshotError::MemorySize { .. }
            | SnapshotError::Mixed { .. } => ErrorKind::SnapshotCorrupt,
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
