//! Whether a large file is still the one that was written, told piece by piece.
//!
//! A restore cannot read all of a guest's memory first. So a file is compared with its checksums once, and
//! how it looked then (inode, size, times of change) is written down: the kernel changes that at any write,
//! hole or truncation, and as long as it is the same the bytes are.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use pvmm_devices::sparse;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash64;

/// Bytes that one sum stands for.
pub const PIECE: u64 = 1 << 20;
/// The most that a list may stand for, 1 TiB.
const MAX_SUMS: u64 = 1 << 20;
/// Pieces for which a thread is worth its start, and the most threads that write one file: a disk is not
/// faster by more.
const PIECES_EACH: usize = 64;
const WRITERS_MAX: usize = 4;

/// The sums of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSums {
    pub file: String,
    pub size: u64,
    /// Of each piece; holes count as zeros.
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
    fn of(self, bytes: &[u8]) -> u32 {
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

    /// Makes an empty file `size` bytes long and fills it, on several processors if it is large, and sums up
    /// what goes through. `read` fills a buffer with what is to stand at a place and returns how much of it is
    /// not a hole, which `progress` hears of.
    pub fn write(
        name: &str,
        file: &File,
        size: u64,
        read: impl Fn(u64, &mut [u8]) -> io::Result<u64> + Sync,
        progress: &mut dyn FnMut(u64),
    ) -> io::Result<Self> {
        file.set_len(size)?;
        let pieces = size.div_ceil(PIECE) as usize;
        let (next, moved) = (AtomicUsize::new(0), AtomicU64::new(0));
        let by = Sum::default();
        let zeros = by.of(&vec![0; PIECE as usize]);
        let work = |tell: &mut dyn FnMut(u64)| -> io::Result<Vec<(usize, u32)>> {
            let mut buffer = vec![0; PIECE as usize];
            let mut sums = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= pieces {
                    return Ok(sums);
                }
                let at = index as u64 * PIECE;
                let len = (size - at).min(PIECE);
                let bytes = buffer.get_mut(..len as usize).unwrap_or_default();
                let data = read(at, bytes)?;
                if data == 0 && len == PIECE {
                    sums.push((index, zeros));
                    continue;
                }
                for part in sparse::filled(bytes) {
                    let place = at + part.start as u64;
                    file.write_all_at(bytes.get(part).unwrap_or_default(), place)?;
                }
                sums.push((index, by.of(bytes)));
                tell(moved.fetch_add(data, Ordering::Relaxed) + data);
            }
        };
        let parts = thread::scope(|scope| {
            let spawn = |_| thread::Builder::new().spawn_scoped(scope, || work(&mut |_| {})).ok();
            let others: Vec<_> = (1..writers(pieces)).filter_map(spawn).collect();
            let mut told = 0;
            let mut tell = |moved: u64| {
                progress(moved.saturating_sub(told));
                told = told.max(moved);
            };
            let mut parts = vec![work(&mut tell)];
            let panicked = |_| Err(io::Error::other("a writing thread panicked"));
            parts.extend(others.into_iter().map(|other| other.join().unwrap_or_else(panicked)));
            parts
        });
        let mut sums = parts.into_iter().collect::<io::Result<Vec<_>>>()?.concat();
        sums.sort_unstable();
        let sums = sums.into_iter().map(|(_, sum)| sum).collect();
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

/// How many threads are worth it for so many pieces.
fn writers(pieces: usize) -> usize {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    processors.min(pieces / PIECES_EACH).min(WRITERS_MAX)
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
    let mut data = sparse::data(file, 0..size)?.into_iter().peekable();
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
