//! Fills a large file piece by piece, on several threads, and computes its checksums.
//!
//! The data to write has just been read, so one pass reads, writes and checksums it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use pvmm_devices::sparse;

use super::checksum::{FileSums, PIECE, sum};

/// Pieces for which starting a thread pays off, and the most threads that write one file: a disk is
/// not faster with more.
const PIECES_EACH: usize = 64;
const WRITERS_MAX: usize = 4;

impl FileSums {
    /// Sets the length of an empty file to `size` and fills it, on several threads if it is large.
    /// `read` fills a buffer with the contents at an offset and returns how many of its bytes are
    /// not in a hole; `progress` is called with these counts. Returns the checksums.
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
        let zeros = sum(&vec![0; PIECE as usize]);
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
                sums.push((index, sum(bytes)));
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
        Ok(Self { file: name.to_owned(), size, sums })
    }
}

/// Returns the number of threads that pay off for `pieces` pieces.
fn writers(pieces: usize) -> usize {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    processors.min(pieces / PIECES_EACH).min(WRITERS_MAX)
}
