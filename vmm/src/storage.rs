//! The bytes behind a drive in the hands of the machine's owner.
//!
//! A device moves bytes; freezing, forking and copying a disk is the owner's business.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pvmm_devices::virtio::block::io::{Changes, LayeredDisk};
use pvmm_devices::virtio::block::{BlockConfig, BlockHandle, Source};
use pvmm_devices::{open, sparse};

use crate::config::DriveSource;
use crate::scratch::Scratch;

/// How often what was written during a copy is copied while the guest runs.
const COPY_ROUNDS: usize = 4;
/// The most bytes that may be left to copy while the guest is paused.
const COPY_ENOUGH: u64 = 4 << 20;

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

/// Opens a drive. Returns the device's part and the owner's part of it. A nameless image that the
/// guest writes becomes layers, if that is allowed.
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
            let storage = if read_only {
                Storage::Fixed { file, path: Some(path.clone()) }
            } else {
                Storage::InPlace { file, path: Some(path.clone()) }
            };
            (Source::Path(path), storage)
        }
        DriveSource::Opened { file, reader, path } => {
            let storage = if read_only {
                Storage::Fixed { file: reader, path: Some(path) }
            } else {
                Storage::InPlace { file: reader, path: Some(path) }
            };
            (Source::File(file), storage)
        }
        DriveSource::Over { base, top } if layered && !read_only => {
            let layers = LayeredDisk::over(base, top)?;
            (Source::Layers(layers.clone()), Storage::Layers(layers))
        }
        DriveSource::Over { .. } => {
            return Err(io::Error::other("a disk over an image is neither direct nor read-only"));
        }
        DriveSource::File(file) if !read_only && layered && file.metadata()?.is_file() => {
            let layers = LayeredDisk::new(file)?;
            (Source::Layers(layers.clone()), Storage::Layers(layers))
        }
        DriveSource::File(file) => {
            let kept = file.try_clone()?;
            let storage = if read_only {
                Storage::Fixed { file: kept, path: None }
            } else {
                Storage::InPlace { file: kept, path: None }
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
    /// The file of this name, in place, opened when a machine runs with it. Without a name every
    /// machine must be given another.
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

/// A drive of a machine: the handle of its device, and the storage behind it.
pub struct AttachedDrive {
    pub handle: BlockHandle,
    pub storage: Storage,
    /// There between [`crate::Vm::prepare_freeze`] and the freeze.
    pub copy: Option<DriveCopy>,
}

impl AttachedDrive {
    pub fn new(handle: BlockHandle, storage: Storage) -> Self {
        Self { handle, storage, copy: None }
    }
}

impl Storage {
    /// The drive as it is now; what is written later goes elsewhere. The guest must be paused. A
    /// drive that is written in place is shared with its copy by the file system, or was copied
    /// before, as [`DriveCopy`] says; otherwise all of it is copied now.
    pub fn freeze(&self, scratch: &Scratch, copy: Option<DriveCopy>) -> io::Result<FrozenStorage> {
        match self {
            Self::Fixed { file, path } => {
                Ok(FrozenStorage::Fixed { file: file.try_clone()?, path: path.clone() })
            }
            Self::Layers(layers) => {
                layers.freeze(|| scratch.file())?;
                Ok(FrozenStorage::Layers(layers.fork(scratch.file()?)?))
            }
            Self::InPlace { file, path } => {
                // Its owner wants the writes in the named file, so it is the copy that stands
                // still.
                let copy = match copy {
                    Some(copy) => copy.finish(file)?,
                    None => copy_of(file, path.as_deref(), scratch)?,
                };
                Ok(FrozenStorage::Layers(LayeredDisk::over(copy, scratch.file()?)?))
            }
            Self::Later { path, read_only } => {
                Ok(FrozenStorage::Named { path: Some(path.clone()), read_only: *read_only })
            }
        }
    }

    /// Begins a copy of a drive that would otherwise be copied by [`Self::freeze`], while the guest
    /// runs.
    pub fn begin_copy(&self, scratch: &Scratch) -> io::Result<Option<DriveCopy>> {
        match self {
            Self::InPlace { file, path } if shared(file, path.as_deref(), scratch).is_none() => {
                Ok(Some(DriveCopy { copy: scratch.file()?, changes: Changes::default() }))
            }
            _ => Ok(None),
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

/// Why a drive that a snapshot only names cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum MissingDrive {
    #[error("drive {index}: {path} is not the file it was; give another with an override")]
    Changed { index: usize, path: String },
    #[error(
        "drive {index}: {path} is in no folder that a snapshot may name files of; allow its \
         folder, or give another drive with an override"
    )]
    NotAllowed { index: usize, path: String },
}

impl MissingDrive {
    pub fn new(index: usize, path: &Path, allowed: bool) -> Self {
        let path = path.display().to_string();
        if allowed { Self::Changed { index, path } } else { Self::NotAllowed { index, path } }
    }
}

impl FrozenStorage {
    /// Restores the drive for a machine in which it had `size` bytes.
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
            Self::Missing { index, path, allowed } => {
                Err(io::Error::other(MissingDrive::new(*index, path, *allowed)))
            }
        }
    }
}

/// A copy of a drive that its guest writes meanwhile. The device notes what it writes in `changes`,
/// from before the copy begins.
#[derive(Debug)]
pub struct DriveCopy {
    copy: File,
    pub changes: Changes,
}

impl DriveCopy {
    /// Copies everything, then what was written meanwhile, until that is little or has been tried
    /// often enough.
    pub fn advance(&self, file: &File) -> io::Result<()> {
        let size = size_of(file)?;
        self.copy.set_len(size)?;
        sparse::copy(file, &self.copy, 0..size)?;
        for _ in 0..COPY_ROUNDS {
            if self.copy_changes(file)? < COPY_ENOUGH {
                break;
            }
        }
        Ok(())
    }

    /// Copies what was written since; the guest must be paused.
    fn finish(self, file: &File) -> io::Result<File> {
        self.copy.set_len(size_of(file)?)?;
        self.copy_changes(file)?;
        Ok(self.copy)
    }

    fn copy_changes(&self, file: &File) -> io::Result<u64> {
        let changed = self.changes.take(self.copy.metadata()?.len());
        for range in &changed {
            // Zeros are not copied, and they may have taken the place of something.
            sparse::punch(&self.copy, range.clone())?;
            sparse::copy(file, &self.copy, range.clone())?;
        }
        Ok(changed.iter().map(|range| range.end - range.start).sum())
    }
}

fn copy_of(file: &File, path: Option<&Path>, scratch: &Scratch) -> io::Result<File> {
    if let Some(copy) = shared(file, path, scratch) {
        return Ok(copy);
    }
    let (copy, size) = (scratch.file()?, size_of(file)?);
    copy.set_len(size)?;
    sparse::copy(file, &copy, 0..size)?;
    Ok(copy)
}

/// The size of a file or block device. All other I/O on it is positioned.
fn size_of(mut file: &File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

/// A copy that shares every block with the file, where the file system can do that.
fn shared(file: &File, path: Option<&Path>, scratch: &Scratch) -> Option<File> {
    let beside = path.and_then(|path| scratch.file_beside(path));
    let copies = beside.into_iter().chain(scratch.file().ok());
    copies.into_iter().find(|copy| sparse::clone(file, copy).is_ok())
}

/// Whether both are the same file: a lock on one would keep the other away.
pub fn is_same_file(one: &File, other: &File) -> bool {
    let facts = |file: &File| file.metadata().map(|facts| (facts.dev(), facts.ino())).ok();
    facts(one).is_some_and(|one| facts(other) == Some(one))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::process::Command;

    use super::*;

    #[test]
    fn drive_written_during_its_copy_is_copied_as_it_was_at_the_end() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let (file, scratch) = (named.reopen().unwrap(), Scratch::new(None, true));
        file.write_all_at(&[1; 64 << 10], 0).unwrap();
        let copy = DriveCopy { copy: scratch.file().unwrap(), changes: Changes::default() };
        copy.advance(&file).unwrap();
        file.write_all_at(&[2; 100], 9000).unwrap();
        sparse::punch(&file, 16 << 10..32 << 10).unwrap();
        copy.changes.note(9000..9100);
        copy.changes.note(16 << 10..32 << 10);
        let copy = copy.finish(&file).unwrap();
        let read = |file: &File| {
            let mut bytes = vec![0xee; 64 << 10];
            file.read_exact_at(&mut bytes, 0).map(|()| bytes).unwrap()
        };
        assert_eq!(read(&copy), read(&file));
    }

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
