//! The host's configuration of a disk, and the configuration space that the guest reads.
//!
//! The configuration is checked here as far as possible without opening anything; `io/` checks the
//! file itself.

use std::fs::File;
use std::path::PathBuf;

use super::io::{EngineKind, LayeredDisk, OpenError};
use super::wire::{ID_LEN, SECTOR_SIZE};
use crate::rate_limiter::{RateLimiterConfig, RateLimiterError};

/// The maximum number of buffers of one request: what fits in a queue with header and status.
pub const SEGMENTS_MAX: u32 = super::device::QUEUE_SIZE as u32 - 2;
/// The maximum number of ranges of one discard or write-zeroes request.
pub const RANGES_MAX: u32 = 16;
/// The maximum number of sectors of one discarded range, 1 GiB.
pub const DISCARD_SECTORS_MAX: u32 = 1 << 21;
/// The maximum number of sectors of one zeroed range, 32 MiB: on some host file systems the zeros
/// have to be written.
pub const ZERO_SECTORS_MAX: u32 = 1 << 16;

/// Whether a flush of the guest reaches the host's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// The guest sees a volatile cache, and its flushes are carried out.
    #[default]
    Writeback,
    /// Flushes are not offered. For disks that are discarded with their machine.
    Unsafe,
}

/// Why a disk could not be created.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    #[error("disk id {id:?} is longer than {ID_LEN} bytes or not printable ASCII")]
    Id { id: String },
    #[error("disk image {name} cannot be used")]
    Open {
        name: String,
        #[source]
        source: OpenError,
    },
    #[error("disk {name}: bad rate limit")]
    Limits {
        name: String,
        #[source]
        source: RateLimiterError,
    },
    #[error("disk {name}: cannot make its descriptors")]
    Descriptors {
        name: String,
        #[source]
        source: std::io::Error,
    },
    #[error("saved disk has {saved} sectors, this one has {here}")]
    Capacity { saved: u64, here: u64 },
    #[error("saved disk was {}, this one is not", if *saved_read_only { "read-only" } else { "writable" })]
    Access { saved_read_only: bool },
}

/// The image of a disk: a path, an open file, or layers.
#[derive(Debug)]
pub enum Source {
    Path(PathBuf),
    /// A file that the caller has opened, with the access that the disk needs.
    File(File),
    /// Copy-on-write layers that the owner of the disk can freeze, fork and roll back.
    Layers(LayeredDisk),
    /// No image yet: it is set before the machine runs.
    Later {
        size: u64,
    },
}

impl Source {
    /// Returns the name of disk `id`'s image for error messages.
    pub fn name(&self, id: &str) -> String {
        match self {
            Self::Path(path) => path.display().to_string(),
            Self::File(_) | Self::Layers(_) | Self::Later { .. } => format!("of disk {id:?}"),
        }
    }
}

/// The host's configuration of a disk.
#[derive(Debug)]
pub struct BlockConfig {
    pub source: Source,
    pub read_only: bool,
    pub cache: CacheMode,
    /// The serial number that the guest reads, at most 20 bytes.
    pub id: String,
    pub engine: EngineKind,
    /// Bypass the host's page cache.
    pub direct: bool,
    pub limits: RateLimiterConfig,
}

impl BlockConfig {
    /// Configures a writable disk on the file at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self::from_source(Source::Path(path.into()))
    }

    /// Configures a writable disk on a file that is already open.
    pub fn from_file(file: File) -> Self {
        Self::from_source(Source::File(file))
    }

    /// Configures a writable disk of copy-on-write layers.
    pub fn from_layers(layers: LayeredDisk) -> Self {
        Self::from_source(Source::Layers(layers))
    }

    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    #[must_use]
    pub fn cache(mut self, cache: CacheMode) -> Self {
        self.cache = cache;
        self
    }

    #[must_use]
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = id.into();
        self
    }

    #[must_use]
    pub fn engine(mut self, engine: EngineKind) -> Self {
        self.engine = engine;
        self
    }

    #[must_use]
    pub fn direct(mut self, direct: bool) -> Self {
        self.direct = direct;
        self
    }

    #[must_use]
    pub fn limits(mut self, limits: RateLimiterConfig) -> Self {
        self.limits = limits;
        self
    }

    /// Checks everything that does not require the file.
    pub fn validate(&self) -> Result<(), BlockError> {
        let printable = self.id.bytes().all(|byte| (0x20..0x7f).contains(&byte));
        if self.id.len() > ID_LEN || !printable {
            return Err(BlockError::Id { id: self.id.clone() });
        }
        let name = || self.name();
        self.limits.validate().map_err(|source| BlockError::Limits { name: name(), source })
    }

    /// Returns the name of the disk's image for error messages.
    pub fn name(&self) -> String {
        self.source.name(&self.id)
    }

    /// Configures a writable disk whose bytes are in `source`.
    pub fn from_source(source: Source) -> Self {
        Self {
            source,
            read_only: false,
            cache: CacheMode::default(),
            id: String::new(),
            engine: EngineKind::default(),
            direct: false,
            limits: RateLimiterConfig::default(),
        }
    }
}

/// Returns the configuration space of virtio 1.2 section 5.2.4, up to the write-zeroes fields.
pub fn space(capacity_sectors: u64, block_size: u32) -> Vec<u8> {
    let mut space = vec![0; 60];
    let mut put = |offset: usize, bytes: &[u8]| {
        space[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    put(0, &capacity_sectors.to_le_bytes());
    put(12, &SEGMENTS_MAX.to_le_bytes());
    put(20, &block_size.to_le_bytes());
    put(36, &DISCARD_SECTORS_MAX.to_le_bytes());
    put(40, &RANGES_MAX.to_le_bytes());
    // Discards need no larger alignment than a block.
    put(44, &(block_size / SECTOR_SIZE as u32).to_le_bytes());
    put(48, &ZERO_SECTORS_MAX.to_le_bytes());
    put(52, &RANGES_MAX.to_le_bytes());
    // Write-zeroes may deallocate blocks where the guest allows it.
    put(56, &[1]);
    space
}
