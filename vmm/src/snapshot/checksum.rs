//! Checksums of large files, one for each piece, and stamps of files that were compared with them.
//!
//! A restore cannot read all of guest memory first. So a file is compared with its checksums once,
//! and its stamp (inode, size, times of change) is recorded. The kernel changes one of these at any
//! write, hole or truncation, so an unchanged stamp means unchanged bytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use pvmm_devices::sparse;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash64;

use crate::packed;

/// Bytes that one checksum covers.
pub const PIECE: u64 = 1 << 20;
/// The most checksums in one list, enough for 1 TiB.
const MAX_SUMS: u64 = 1 << 20;

/// The checksums of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSums {
    pub file: String,
    pub size: u64,
    /// One checksum per piece; holes count as zeros.
    #[serde(with = "packed")]
    pub sums: Vec<u32>,
}

/// Returns the checksum of a piece: the low half of XXH64, which is fast without special
/// instructions.
pub(super) fn sum(bytes: &[u8]) -> u32 {
    XxHash64::oneshot(0, bytes) as u32
}

impl FileSums {
    /// Reads the data of a file and computes its checksums.
    pub fn of(name: &str, file: &File, size: u64) -> io::Result<Self> {
        let mut sums = Vec::new();
        each_piece(file, size, |_, sum| {
            sums.push(sum);
            true
        })?;
        Ok(Self { file: name.to_owned(), size, sums })
    }

    /// Returns the offset of the first piece that differs, if any does.
    pub fn compare(&self, file: &File) -> io::Result<Option<u64>> {
        let mut differs = None;
        each_piece(file, self.size, |index, sum| {
            if self.sums.get(index) != Some(&sum) {
                differs = Some(index as u64 * PIECE);
            }
            differs.is_none()
        })?;
        Ok(differs)
    }

    /// Returns whether the list has as many checksums as the file's size needs.
    pub fn is_whole(&self) -> bool {
        let pieces = self.size.div_ceil(PIECE);
        pieces <= MAX_SUMS && pieces == self.sums.len() as u64
    }
}

/// Computes the checksum of every piece in order, until `take` returns false. Pieces without data
/// are not read.
fn each_piece(file: &File, size: u64, mut take: impl FnMut(usize, u32) -> bool) -> io::Result<()> {
    let zeros = sum(&vec![0; PIECE as usize]);
    let mut buffer = vec![0; PIECE as usize];
    // A block device has no holes to report.
    let data = if file.metadata()?.is_file() {
        sparse::data(file, 0..size)?
    } else {
        std::iter::once(0..size).collect()
    };
    let mut data = data.into_iter().peekable();
    let mut at = 0;
    while at < size {
        let end = (at + PIECE).min(size);
        while data.peek().is_some_and(|part| part.end <= at) {
            data.next();
        }
        let found = match data.peek() {
            Some(part) if part.start < end => {
                let bytes = buffer.get_mut(..(end - at) as usize).unwrap_or_default();
                file.read_exact_at(bytes, at)?;
                sum(bytes)
            }
            _ if end - at == PIECE => zeros,
            _ => sum(&vec![0; (end - at) as usize]),
        };
        if !take((at / PIECE) as usize, found) {
            break;
        }
        at = end;
    }
    Ok(())
}

/// The metadata of a file when it was last compared with its checksums.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    pub file: String,
    pub inode: u64,
    pub size: u64,
    pub modified: (i64, i64),
    pub changed: (i64, i64),
}

impl Stamp {
    pub fn of(name: &str, file: &File) -> io::Result<Self> {
        let facts = file.metadata()?;
        Ok(Self {
            file: name.to_owned(),
            inode: facts.ino(),
            size: facts.size(),
            modified: (facts.mtime(), facts.mtime_nsec()),
            changed: (facts.ctime(), facts.ctime_nsec()),
        })
    }
}
