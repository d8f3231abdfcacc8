//! The files of an image: in a folder, or in an archive that is read in place.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::budget::{Budget, MAX_HEAD};

/// The most files of an archive.
const MAX_FILES: usize = 100_000;

/// Files by their path.
pub enum Files {
    Folder(PathBuf),
    Archive { file: File, places: BTreeMap<String, Place> },
}

/// The place of a file in an archive.
#[derive(Clone, Copy)]
pub struct Place {
    at: u64,
    length: u64,
}

impl Files {
    /// Opens a folder, or an archive that is not compressed.
    pub fn open(path: &Path) -> io::Result<Self> {
        // A pipe in the place of an archive would be waited for.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let meta = file.metadata()?;
        if meta.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file and no folder"));
        }
        let mut places = BTreeMap::new();
        let left = Cell::new(MAX_HEAD);
        let whole = Part { file: &file, start: 0, length: meta.len(), at: 0 };
        let mut archive = tar::Archive::new(Budget { inner: whole, left: &left });
        // What lies between the heads is not read.
        for entry in archive.entries_with_seek()? {
            left.set(MAX_HEAD);
            let entry = entry?;
            let place = Place { at: entry.raw_file_position(), length: entry.size() };
            let end = place.at.checked_add(place.length);
            if end.is_none_or(|end| end > meta.len()) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let (true, Some(name)) =
                (entry.header().entry_type().is_file(), entry.path()?.to_str())
            {
                places.insert(name.trim_start_matches("./").to_owned(), place);
            }
            if places.len() > MAX_FILES {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it has too many files"));
            }
        }
        Ok(Self::Archive { file, places })
    }

    /// Opens a file. In a folder, `path` leads down.
    pub fn read(&self, path: &str) -> io::Result<Box<dyn Read + '_>> {
        match self {
            Self::Folder(dir) => {
                let mut options = File::options();
                options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW);
                let file = options.open(dir.join(path))?;
                if !file.metadata()?.is_file() {
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file"));
                }
                Ok(Box::new(file))
            }
            Self::Archive { file, places } => {
                let place = places.get(path).ok_or(io::ErrorKind::NotFound)?;
                Ok(Box::new(Part { file, start: place.at, length: place.length, at: 0 }))
            }
        }
    }
}

/// A part of a file.
struct Part<'a> {
    file: &'a File,
    start: u64,
    length: u64,
    at: u64,
}

impl Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.length.saturating_sub(self.at);
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.file.read_at(&mut buffer[..most], self.start + self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for Part<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.length.checked_add_signed(by),
        };
        self.at = at.filter(|at| *at <= self.length).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
