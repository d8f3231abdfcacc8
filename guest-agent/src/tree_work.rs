//! Transfers whole trees to and from the guest, as tar archives through a pipe.
//!
//! One request serves a tree, where a request for each file would wait for an answer each time.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use pvmm_guest_agent::archive::{self, ArchiveError, Holes, MAX_ENTRIES, Unpack};
use pvmm_guest_agent::message::WriteTar;

use crate::sys;

/// Bytes written to the pipe at once.
const CHUNK: usize = 64 << 10;
const HOLES: Holes = Holes { next_data: sys::next_data, next_hole: sys::next_hole };

/// Sends the tree at `root` and returns the size of its archive.
pub fn read(root: &Path, pipe: File) -> Result<u64, ArchiveError> {
    let mut counted = Counted { inner: pipe, total: 0 };
    archive::pack(root, BufWriter::with_capacity(CHUNK, &mut counted), HOLES, None)?;
    Ok(counted.total)
}

/// Unpacks the archive from the pipe and returns its size. Fails unless the client ended the input.
pub fn write(
    request: &WriteTar,
    target: &Path,
    pipe: File,
    committed: &AtomicBool,
) -> Result<u64, ArchiveError> {
    let mut counted = Counted { inner: pipe, total: 0 };
    let mut input = BufReader::with_capacity(CHUNK, &mut counted);
    let options = Unpack { owners: request.owners, modes: 0o7777, max_entries: MAX_ENTRIES };
    archive::unpack(&mut input, target, options, &mut |_| {})?;
    // Skip the padding that other programs add to an archive.
    let failed = |source| ArchiveError { act: "receive", path: target.to_owned(), source };
    io::copy(&mut input, &mut io::sink()).map_err(failed)?;
    if committed.load(Ordering::Acquire) {
        Ok(counted.total)
    } else {
        Err(failed(ErrorKind::BrokenPipe.into()))
    }
}

/// Checks that there is a directory to send.
pub fn check(root: &Path) -> io::Result<fs::Metadata> {
    let facts = fs::metadata(root)?;
    if facts.is_dir() { Ok(facts) } else { Err(io::Error::from_raw_os_error(libc::ENOTDIR)) }
}

/// A pipe that counts the bytes through it.
struct Counted {
    inner: File,
    total: u64,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.total += count as u64;
        Ok(count)
    }
}

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.total += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
