//! The bytes behind a drive in the hands of the machine's owner.
//!
//! A device moves bytes; freezing, forking and copying a disk is the owner's business.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use pvmm_devices::virtio::block::io::LayeredDisk;
use pvmm_devices::virtio::block::{BlockConfig, Source};
use pvmm_devices::{open, sparse};

use crate::config::DriveSource;
use crate::scratch::Scratch;
use crate::snapshot::SnapshotError;

/// A drive in the owner's hands.
#[derive(Debug)]
pub enum Storage {
    /// The guest only reads it.
    Fixed { file: File, path: Option<PathBuf> },
    /// The guest's own: it has no name and ends with the machine.
    Layers(LayeredDisk),
    /// A file that the guest writes in place and that outlives the machine.
    InPlace { file: File, path: Option<PathBuf> },
    /// Opened when the machine is resumed.
    Later { path: PathBuf, read_only: bool },
}

/// What the device needs and what the owner keeps. A nameless image that the guest writes becomes layers,
/// if that is allowed.
pub fn open_source(
    source: DriveSource,
    read_only: bool,
    layered: bool,
) -> io::Result<(Source, Storage)> {
    Ok(match source {
        DriveSource::Path(path) | DriveSource::Later(path) => {
            let file = open::image(&path, open::Access::Read).map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            })?;
            let storage = match read_only {
                true => Storage::Fixed { file, path: Some(path.clone()) },
                false => Storage::InPlace { file, path: Some(path.clone()) },
            };
            (Source::Path(path), storage)
        }
        DriveSource::File(file) if !read_only && layered && file.metadata()?.is_file() => {
            let layers = LayeredDisk::new(file)?;
            (Source::Layers(layers.clone()), Storage::Layers(layers))
        }
        DriveSource::File(file) => {
            let kept = file.try_clone()?;
            let storage = match read_only {
                true => Storage::Fixed { file: kept, path: None },
                false => Storage::InPlace { file: kept, path: None },
            };
            (Source::File(file), storage)
        }
    })
}

/// A drive as it was at one instant, from which any number of machines can go on.
#[derive(Debug)]
pub enum FrozenStorage {
    Fixed {
        file: File,
        path: Option<PathBuf>,
    },
    Layers(LayeredDisk),
    /// The file of this name, in place, opened when a machine runs with it. Without a name every machine must
    /// be given another.
    Named {
        path: Option<PathBuf>,
        read_only: bool,
    },
    /// Was a file elsewhere that is gone or changed, or that the snapshot may not name.
    Missing {
        index: usize,
        path: PathBuf,
        allowed: bool,
    },
}

impl Storage {
    /// The drive as it is now; what is written later goes elsewhere. The guest must be paused.
    pub fn freeze(&self, scratch: &Scratch) -> io::Result<FrozenStorage> {
        match self {
            Self::Fixed { file, path } => {
                Ok(FrozenStorage::Fixed { file: file.try_clone()?, path: path.clone() })
            }
            Self::Layers(layers) => {
                layers.freeze(|| scratch.file())?;
                Ok(FrozenStorage::Layers(layers.fork(scratch.file()?)?))
            }
            Self::InPlace { file, .. } => {
                // Its owner wants the writes in the named file, so it is the copy that stands still.
                let copy = scratch.file()?;
                let size = file.metadata()?.len();
                copy.set_len(size)?;
                if sparse::clone(file, &copy).is_err() {
                    sparse::copy(file, &copy, 0..size)?;
                }
                Ok(FrozenStorage::Layers(LayeredDisk::over(copy, scratch.file()?)?))
            }
            Self::Later { path, read_only } => {
                Ok(FrozenStorage::Named { path: Some(path.clone()), read_only: *read_only })
            }
        }
    }

    /// Whether the guest may only read it.
    pub fn is_read_only(&self) -> bool {
        matches!(self, Self::Fixed { .. } | Self::Later { read_only: true, .. })
    }

    /// The open file, if there is one and it is one.
    pub fn file(&self) -> Option<&File> {
        match self {
            Self::Fixed { file, .. } | Self::InPlace { file, .. } => Some(file),
            Self::Layers(_) | Self::Later { .. } => None,
        }
    }

    /// Why the drive cannot be taken back to what it was when `then` was frozen, if that is so.
    pub fn cannot_rewind(&self, then: &FrozenStorage) -> Option<&'static str> {
        let may = match (self, then) {
            (Self::Fixed { file, .. }, FrozenStorage::Fixed { file: then, .. }) => {
                is_same_file(file, then)
            }
            (Self::Layers(layers), FrozenStorage::Layers(then)) => layers.can_rewind(then),
            // Was not opened yet when it was frozen, and is only read.
            (Self::Fixed { path, .. }, FrozenStorage::Named { path: then, .. }) => path == then,
            (Self::Later { path, .. }, FrozenStorage::Named { path: then, .. }) => {
                Some(path) == then.as_ref()
            }
            _ => false,
        };
        if may { None } else { Some("it was another image then; put that one back first") }
    }

    /// Takes the drive back to what it was when `then` was frozen. The guest must be paused, and
    /// [`Self::cannot_rewind`] must have been asked.
    pub fn rewind(&self, then: &FrozenStorage) -> io::Result<()> {
        match (self, then) {
            (Self::Layers(layers), FrozenStorage::Layers(then)) => layers.rewind(then),
            _ => Ok(()),
        }
    }

    /// Why it could not be taken back, if that is so.
    pub fn one_way(&self) -> Option<String> {
        let path = match self {
            Self::InPlace { path, .. } => path.as_ref(),
            Self::Later { path, read_only: false } => Some(path),
            _ => return None,
        };
        let name = path.map_or("it".to_owned(), |path| path.display().to_string());
        Some(format!("{name} is written in place and cannot be taken back"))
    }
}

impl FrozenStorage {
    /// The same for a machine that goes on from here, in which the drive had `size` bytes.
    pub fn thaw(&self, scratch: &Scratch, size: u64) -> io::Result<(BlockConfig, Storage)> {
        match self {
            Self::Named { path: Some(path), read_only } => {
                let held = Storage::Later { path: path.clone(), read_only: *read_only };
                Ok((BlockConfig::from_source(Source::Later { size }).read_only(*read_only), held))
            }
            Self::Named { path: None, .. } => {
                Err(io::Error::other("had no path; give one with an override"))
            }
            Self::Fixed { file, path } => {
                let held = Storage::Fixed { file: file.try_clone()?, path: path.clone() };
                Ok((BlockConfig::from_file(file.try_clone()?).read_only(true), held))
            }
            Self::Layers(layers) => {
                let layers = layers.fork(scratch.file()?)?;
                Ok((BlockConfig::from_layers(layers.clone()), Storage::Layers(layers)))
            }
            Self::Missing { index, .. } => Err(io::Error::other(self.missing(*index))),
        }
    }

    /// What is wrong with a drive that is not there.
    pub fn missing(&self, index: usize) -> SnapshotError {
        match self {
            Self::Missing { path, allowed: false, .. } => {
                SnapshotError::DriveRoot { index, path: path.display().to_string() }
            }
            Self::Missing { path, .. } => {
                SnapshotError::Drive { index, path: path.display().to_string() }
            }
            _ => SnapshotError::Drive { index, path: String::new() },
        }
    }
}

/// Whether both are the same file: a lock on one would keep the other away.
pub fn is_same_file(one: &File, other: &File) -> bool {
    let facts = |file: &File| file.metadata().map(|facts| (facts.dev(), facts.ino())).ok();
    facts(one).is_some_and(|one| facts(other) == Some(one))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn drive_that_is_a_pipe_is_refused_and_waits_for_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for read_only in [true, false] {
            let error = open_source(DriveSource::Path(pipe.clone()), read_only, false).unwrap_err();
            assert!(error.to_string().contains("neither a regular file"), "{error}");
        }
    }
}
