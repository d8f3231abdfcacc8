//! A cap on what is read of an archive before an entry's own data.
//!
//! Long names and attributes are read into memory by the library that reads archives, whatever
//! length their header says.

use std::cell::Cell;
use std::io::{self, Read, Seek, SeekFrom};

/// The most bytes before an entry's own data: its header, long names, attributes.
pub const MAX_HEAD: u64 = 4 << 20;

/// Stops a reader that reads too much before an entry's data.
pub struct Budget<'a, R> {
    pub inner: R,
    pub left: &'a Cell<u64>,
}

impl<R: Read> Read for Budget<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 {
            let text = "the header of an entry is too long";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.inner.read(&mut buffer[..most])?;
        if left != u64::MAX {
            self.left.set(left - count as u64);
        }
        Ok(count)
    }
}

impl<R: Seek> Seek for Budget<'_, R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}
