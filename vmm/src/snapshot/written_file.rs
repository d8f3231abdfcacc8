//! Writes one file so that it appears under its name whole or not at all, where that is possible.
//!
//! The file is written under a hidden name in its folder, synced and renamed. A killed writer
//! leaves a hidden file that no process holds a lock on; the next writer in the folder removes it.
//! A block device, or a file in a folder that may not be written, is written in place: there is no
//! other way.

use std::cell::Cell;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pvmm_devices::sparse;

use super::SnapshotError;
use super::write::{UNFINISHED, random_id, sweep};
use crate::memory::MemoryError;
use crate::sys;

/// A file that is being written. Dropping it removes the file unless it was published.
pub struct WrittenFile {
    file: File,
    /// The final name.
    path: PathBuf,
    /// The name until it is published; `None` if the file is written in place.
    hidden: Option<PathBuf>,
    published: Cell<bool>,
}

impl WrittenFile {
    /// Creates an empty file that will replace the file at `path`.
    pub fn create(path: &Path) -> Result<Self, SnapshotError> {
        let named = named(path)?;
        let existing = match fs::metadata(&named) {
            Ok(facts) if facts.is_dir() => {
                return Err(cannot(path, io::ErrorKind::IsADirectory.into()));
            }
            Ok(facts) => Some(facts),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(cannot(path, error)),
        };
        if existing.as_ref().is_some_and(|facts| !facts.is_file()) {
            return Self::open_in_place(path, named);
        }
        let parent = folder(&named);
        // Folders are left to the next writer of a folder: removing one takes system calls that the
        // API server of a confined process may not make.
        sweep(&parent, |path| fs::remove_file(path));
        let id = random_id().map_err(|error| cannot(path, error))?;
        let hidden = parent.join(format!("{UNFINISHED}{id}"));
        let mode = existing.as_ref().map_or(0o600, |facts| facts.mode() & 0o777);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(mode);
        match options.open(&hidden) {
            Ok(file) => {
                let made =
                    Self { file, path: named, hidden: Some(hidden), published: Cell::new(false) };
                sys::lock_file(&made.file).map_err(|error| cannot(path, error))?;
                Ok(made)
            }
            Err(error) if existing.is_some() && is_forbidden(&error) => {
                Self::open_in_place(path, named)
            }
            Err(error) => Err(cannot(path, error)),
        }
    }

    /// Creates a file of `size` bytes with the contents of the file at `path` if that has this
    /// size, otherwise with zeros. Where the file system cannot share blocks, the old file is
    /// written in place.
    pub fn over(path: &Path, size: u64) -> Result<Self, SnapshotError> {
        let named = named(path)?;
        let old = match OpenOptions::new().read(true).write(true).open(&named) {
            Ok(old) => Some(old),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(cannot(path, error)),
        };
        let failed = |error| cannot(path, error);
        let old = match old {
            Some(old) => {
                let facts = old.metadata().map_err(failed)?;
                (!facts.is_file() || facts.len() == size).then_some(old)
            }
            None => None,
        };
        let made = Self::create(path)?;
        if made.in_place() {
            made.check_size(size)?;
            return Ok(made);
        }
        match old {
            Some(old) if sparse::clone(&old, &made.file).is_err() => {
                drop(made);
                Ok(Self { file: old, path: named, hidden: None, published: Cell::new(true) })
            }
            _ => {
                made.file.set_len(size).map_err(failed)?;
                Ok(made)
            }
        }
    }

    fn open_in_place(path: &Path, named: PathBuf) -> Result<Self, SnapshotError> {
        // Do not wait for a reader, should it be a pipe.
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        let file = options.open(&named).map_err(|error| cannot(path, error))?;
        Ok(Self { file, path: named, hidden: None, published: Cell::new(true) })
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns whether writes are visible at once, over the old contents.
    pub fn in_place(&self) -> bool {
        self.hidden.is_none()
    }

    /// Sets the length of a regular file to `size`. Devices are left as they are.
    pub fn check_size(&self, size: u64) -> Result<(), SnapshotError> {
        let facts = self.file.metadata().map_err(|error| cannot(&self.path, error))?;
        if facts.is_file() && facts.len() != size {
            self.file.set_len(size).map_err(|error| cannot(&self.path, error))
        } else {
            Ok(())
        }
    }

    pub fn write_all(&mut self, bytes: &[u8]) -> Result<(), SnapshotError> {
        let written = self.file.write_all(bytes).and_then(|()| {
            if self.in_place() { self.file.set_len(bytes.len() as u64) } else { Ok(()) }
        });
        written.map_err(|error| cannot(&self.path, error))?;
        self.sync()
    }

    /// Syncs the file, so that its contents survive a power cut.
    pub fn sync(&self) -> Result<(), SnapshotError> {
        self.file.sync_all().map_err(|error| cannot(&self.path, error))
    }

    /// Converts a failure to write memory to this file.
    pub fn failed(&self, error: MemoryError) -> SnapshotError {
        match error {
            MemoryError::Write(source) => cannot(&self.path, source),
            other => cannot(&self.path, io::Error::other(other)),
        }
    }

    /// Converts an I/O error of this file.
    pub fn cannot(&self, error: io::Error) -> SnapshotError {
        cannot(&self.path, error)
    }

    /// Renames the file to its final name and syncs its folder.
    pub fn publish(&self) -> Result<(), SnapshotError> {
        let Some(hidden) = &self.hidden else { return Ok(()) };
        let publish = || -> io::Result<()> {
            fs::rename(hidden, &self.path)?;
            self.published.set(true);
            File::open(folder(&self.path))?.sync_all()
        };
        publish().map_err(|error| cannot(&self.path, error))
    }
}

impl Drop for WrittenFile {
    fn drop(&mut self) {
        if let Some(hidden) = self.hidden.as_ref().filter(|_| !self.published.get()) {
            // A file that cannot be removed now is removed by the next writer.
            let _ = fs::remove_file(hidden);
        }
    }
}

/// Resolves `path` if it is a symbolic link, so that the link itself is not replaced.
fn named(path: &Path) -> Result<PathBuf, SnapshotError> {
    if path.file_name().is_none() {
        return Err(cannot(path, io::Error::other("it is not the name of a file")));
    }
    match fs::symlink_metadata(path) {
        Ok(facts) if facts.is_symlink() => {
            fs::canonicalize(path).map_err(|error| cannot(path, error))
        }
        _ => Ok(path.to_owned()),
    }
}

fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn is_forbidden(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS))
}

fn cannot(path: &Path, source: io::Error) -> SnapshotError {
    SnapshotError::Write { file: path.display().to_string(), source }
}
