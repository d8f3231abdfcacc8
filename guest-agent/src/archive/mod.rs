//! Whole trees as tar archives: how one is packed, and how one is unpacked.
//!
//! Both ends do both, since a tree travels either way, and both unpack with suspicion: an archive from a
//! guest may say anything, and so may one that somebody gave a host to pass on.
//!
//! The format is GNU tar's: long names as `L` and `K` entries, files with holes as `S` entries. What another
//! program packed is taken as well, and what is packed here can be read by any.

mod pack;
mod unpack;

#[cfg(test)]
mod tests;

use std::error::Error;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

pub use pack::pack;
pub use unpack::{MAX_ENTRIES, Unpack, unpack};

/// Where a file has data and where it has none; the calls are each end's own.
#[derive(Clone, Copy)]
pub struct Holes {
    /// The first place from here on that has data.
    pub next_data: fn(&File, u64) -> io::Result<Option<u64>>,
    /// The first place from here on that has none.
    pub next_hole: fn(&File, u64) -> io::Result<Option<u64>>,
}

/// What failed, and with which file.
#[derive(Debug, thiserror::Error)]
#[error("cannot {act} {}", path.display())]
pub struct ArchiveError {
    pub act: &'static str,
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

impl ArchiveError {
    /// The kernel's own word, however deep it lies.
    pub fn errno(&self) -> Option<i32> {
        let mut error: Option<&(dyn Error + 'static)> = Some(&self.source);
        while let Some(cause) = error {
            let io = cause.downcast_ref::<io::Error>();
            if let Some(errno) = io.and_then(io::Error::raw_os_error) {
                return Some(errno);
            }
            error = match io.and_then(io::Error::get_ref) {
                Some(inner) => Some(inner),
                None => cause.source(),
            };
        }
        None
    }
}

/// Names what was done to which file.
trait At<T> {
    fn at(self, path: &Path, act: &'static str) -> Result<T, ArchiveError>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, path: &Path, act: &'static str) -> Result<T, ArchiveError> {
        self.map_err(|source| ArchiveError { act, path: path.to_owned(), source })
    }
}

fn errno(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}
