//! Whether a large file is still the one that was written, told piece by piece.
//!
//! A restore cannot read all of a guest's memory first. So a file is compared with its checksums once, and
//! how it looked then (inode, size, times of change) is written down: the kernel changes that at any write,
//! hole or truncation, and as long as it is the same the bytes are.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use pvmm_devices::sparse;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash64;

use crate::packed;

/// Bytes that one sum stands for.
pub const PIECE: u64 = 1 << 20;
/// The most that a list may stand for, 1 TiB.
const MAX_SUMS: u64 = 1 << 20;

/// The sums of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSums {
    pub file: String,
    pub size: u64,
    /// Of each piece; holes count as zeros.
    #[serde(with = "packed")]
    pub sums: Vec<u32>,
    #[serde(skip)]
    pub by: Sum,
}

/// How a piece is summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sum {
    /// In the first snapshots.
    Crc32,
    /// The low half of XXH64, which needs no instructions of its own to be fast.
    #[default]
    Xxh64,
}

impl Sum {
    pub(super) fn of(self, bytes: &[u8]) -> u32 {
        match self {
            Self::Crc32 => crc32fast::hash(bytes),
            Self::Xxh64 => XxHash64::oneshot(0, bytes) as u32,
        }
    }
}

impl FileSums {
    /// Reads a file's data and sums it up.
    pub fn of(name: &str, file: &File, size: u64) -> io::Result<Self> {
        let (by, mut sums) = (Sum::default(), Vec::new());
        each_piece(file, size, by, |_, sum| {
            sums.push(sum);
            true
        })?;
        Ok(Self { file: name.to_owned(), size, sums, by })
    }

    /// The first byte of the first piece that differs, if any does.
    pub fn compare(&self, file: &File) -> io::Result<Option<u64>> {
        let mut differs = None;
        each_piece(file, self.size, self.by, |index, sum| {
            if self.sums.get(index) != Some(&sum) {
                differs = Some(index as u64 * PIECE);
            }
            differs.is_none()
        })?;
        Ok(differs)
    }

    /// Whether the list has the length that its size asks for.
    pub fn is_whole(&self) -> bool {
        let pieces = self.size.div_ceil(PIECE);
        pieces <= MAX_SUMS && pieces == self.sums.len() as u64
    }
}

/// Sums every piece in order, while `take` wants more. Pieces without data are not read.
fn each_piece(
    file: &File,
    size: u64,
    by: Sum,
    mut take: impl FnMut(usize, u32) -> bool,
) -> io::Result<()> {
    let zeros = by.of(&vec![0; PIECE as usize]);
    let mut buffer = vec![0; PIECE as usize];
    // A block device has no holes to tell of.
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
        let sum = match data.peek() {
            Some(part) if part.start < end => {
                let bytes = buffer.get_mut(..(end - at) as usize).unwrap_or_default();
                file.read_exact_at(bytes, at)?;
                by.of(bytes)
            }
            _ if end - at == PIECE => zeros,
            _ => by.of(&vec![0; (end - at) as usize]),
        };
        if !take((at / PIECE) as usize, sum) {
            break;
        }
        at = end;
    }
    Ok(())
}

/// How a file looked when it was last compared.
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
