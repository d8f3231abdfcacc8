//! What the owner of a machine keeps of its drives, beside the devices that serve them.
//!
//! A device moves bytes; freezing, forking and copying a disk is the owner's business.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use pvmm_devices::sparse;
use pvmm_devices::virtio::block::BlockConfig;
use pvmm_devices::virtio::block::io::LayeredDisk;

use crate::config::{Drive, DriveSource};
use crate::error::{Error, ErrorKind};
use crate::scratch::Scratch;
use crate::snapshot::SnapshotError;

/// A drive in the owner's hands.
#[derive(Debug)]
pub enum HeldDrive {
    /// The guest only reads it.
    Fixed { file: File, path: Option<PathBuf> },
    /// The guest's own: it has no name and ends with the machine.
    Layers(LayeredDisk),
    /// A named file that the guest writes in place and that outlives the machine.
    InPlace { file: File, path: PathBuf },
}

/// What the device needs and what the owner keeps.
pub fn open(drive: Drive, index: usize) -> Result<(BlockConfig, HeldDrive), Error> {
    let failed = |error: io::Error| {
        Error::new(ErrorKind::InvalidConfig, format!("drive {index}: cannot open it"), error)
    };
    let opened = match (drive.source, drive.read_only) {
        (DriveSource::Path(path), read_only) => {
            let file = File::open(&path).map_err(|error| {
                let act = format!("drive {index}: cannot open {}", path.display());
                Error::new(ErrorKind::InvalidConfig, act, error)
            })?;
            let held = match read_only {
                true => HeldDrive::Fixed { file, path: Some(path.clone()) },
                false => HeldDrive::InPlace { file, path: path.clone() },
            };
            (BlockConfig::new(path), held)
        }
        (DriveSource::File(file), true) => {
            let held = HeldDrive::Fixed { file: file.try_clone().map_err(failed)?, path: None };
            (BlockConfig::from_file(file), held)
        }
        (DriveSource::File(file), false) => {
            let layers = LayeredDisk::new(file).map_err(failed)?;
            (BlockConfig::from_layers(layers.clone()), HeldDrive::Layers(layers))
        }
    };
    Ok((opened.0.read_only(drive.read_only), opened.1))
}

/// A drive as it was at one instant, from which any number of machines can go on.
#[derive(Debug)]
pub enum FrozenDrive {
    Fixed {
        file: File,
        path: Option<PathBuf>,
    },
    Layers(LayeredDisk),
    /// Was a file elsewhere that is gone or changed.
    Missing {
        index: usize,
        path: PathBuf,
    },
}

impl HeldDrive {
    /// The drive as it is now; what is written later goes elsewhere. The guest must be paused.
    pub fn freeze(&self, scratch: &Scratch) -> io::Result<FrozenDrive> {
        match self {
            Self::Fixed { file, path } => {
                Ok(FrozenDrive::Fixed { file: file.try_clone()?, path: path.clone() })
            }
            Self::Layers(layers) => {
                layers.freeze(|| scratch.file())?;
                Ok(FrozenDrive::Layers(layers.fork(scratch.file()?)?))
            }
            Self::InPlace { file, .. } => {
                // Its owner wants the writes in the named file, so it is the copy that stands still.
                let copy = scratch.file()?;
                let size = file.metadata()?.len();
                copy.set_len(size)?;
                if sparse::clone(file, &copy).is_err() {
                    sparse::copy(file, &copy, 0..size)?;
                }
                Ok(FrozenDrive::Layers(LayeredDisk::over(copy, scratch.file()?)?))
            }
        }
    }

    /// Forgets what the guest wrote since it was frozen. The guest must be paused.
    pub fn discard(&self) -> io::Result<()> {
        match self {
            Self::Fixed { .. } => Ok(()),
            Self::Layers(layers) => layers.discard(),
            Self::InPlace { path, .. } => Err(io::Error::other(format!(
                "{} is written in place and cannot be taken back",
                path.display()
            ))),
        }
    }
}

impl FrozenDrive {
    /// The same for a machine that goes on from here.
    pub fn thaw(&self, scratch: &Scratch) -> io::Result<(BlockConfig, HeldDrive)> {
        match self {
            Self::Fixed { file, path } => {
                let held = HeldDrive::Fixed { file: file.try_clone()?, path: path.clone() };
                Ok((BlockConfig::from_file(file.try_clone()?).read_only(true), held))
            }
            Self::Layers(layers) => {
                let layers = layers.fork(scratch.file()?)?;
                Ok((BlockConfig::from_layers(layers.clone()), HeldDrive::Layers(layers)))
            }
            Self::Missing { index, .. } => Err(io::Error::other(self.missing(*index))),
        }
    }

    /// What is wrong with a drive that is not there.
    pub fn missing(&self, index: usize) -> SnapshotError {
        let path = match self {
            Self::Missing { path, .. } => path.display().to_string(),
            Self::Fixed { .. } | Self::Layers(_) => String::new(),
        };
        SnapshotError::Drive { index, path }
    }
}
