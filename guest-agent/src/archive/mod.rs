//! Packs whole trees as tar archives, and unpacks them.
//!
//! Both ends do both, since a tree is sent in either direction, and both treat archives as
//! untrusted: one from a guest may contain anything, and so may one that a host passes on.
//!
//! The format is GNU tar's: long names as `L` and `K` entries, files with holes as `S` entries.
//! Archives of other programs are accepted as well, and any program can read the archives packed
//! here.

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

/// Functions that find data and holes in a file; each end has its own system calls.
#[derive(Clone, Copy)]
pub struct Holes {
    /// Returns the first offset at or after the given one that has data.
    pub next_data: fn(&File, u64) -> io::Result<Option<u64>>,
    /// Returns the first offset at or after the given one that has no data.
    pub next_hole: fn(&File, u64) -> io::Result<Option<u64>>,
}

/// A failed operation on a file of an archive.
#[derive(Debug, thiserror::Error)]
#[error("cannot {act} {}", path.display())]
pub struct ArchiveError {
    pub act: &'static str,
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

impl ArchiveError {
    /// Returns the kernel's error number, however deep in the chain of causes it is.
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

/// Adds the path and the operation to an error.
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
