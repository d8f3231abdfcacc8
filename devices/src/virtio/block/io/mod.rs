//! What a disk needs of the host, and the kinds of host storage there are.
//!
//! The trait is small so that a test can be a disk that fails, and a faster engine can take its place.

mod file;
mod layers;

use std::io;

use vm_memory::VolatileSlice;

pub use file::{FileDisk, OpenError};
pub use layers::LayeredDisk;

pub use crate::sys::Clear;

/// Storage that moves bytes between itself and guest memory.
pub trait DiskIo: Send {
    /// Fills the buffers from `offset`; may be short, zero at the end of the storage.
    fn read(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize>;

    /// Stores the buffers at `offset`; may be short.
    fn write(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize>;

    /// Makes everything that was written survive a power cut.
    fn sync(&self) -> io::Result<()>;

    /// Makes a range read as zero.
    fn clear(&self, how: Clear, offset: u64, len: u64) -> io::Result<()>;
}

/// Reads all of the buffers, however often the storage is short or interrupted.
pub fn read_full(disk: &dyn DiskIo, buffers: &[VolatileSlice], offset: u64) -> io::Result<()> {
    full(buffers, offset, io::ErrorKind::UnexpectedEof, |buffers, at| disk.read(buffers, at))
}

/// Writes all of the buffers, however often the storage is short or interrupted.
pub fn write_full(disk: &dyn DiskIo, buffers: &[VolatileSlice], offset: u64) -> io::Result<()> {
    full(buffers, offset, io::ErrorKind::WriteZero, |buffers, at| disk.write(buffers, at))
}

fn full(
    buffers: &[VolatileSlice],
    offset: u64,
    at_end: io::ErrorKind,
    mut step: impl FnMut(&[VolatileSlice], u64) -> io::Result<usize>,
) -> io::Result<()> {
    let mut left: Vec<_> = buffers.iter().filter(|buffer| !buffer.is_empty()).copied().collect();
    let mut offset = offset;
    while !left.is_empty() {
        match step(&left, offset) {
            Ok(0) => return Err(at_end.into()),
            Ok(done) => {
                offset = offset.checked_add(done as u64).ok_or(io::ErrorKind::InvalidInput)?;
                advance(&mut left, done)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Drops the first `done` bytes of the buffers.
fn advance(buffers: &mut Vec<VolatileSlice>, mut done: usize) -> io::Result<()> {
    let whole = buffers.iter().take_while(|buffer| {
        let all = done >= buffer.len();
        done -= if all { buffer.len() } else { 0 };
        all
    });
    let whole = whole.count();
    buffers.drain(..whole);
    if let Some(first) = buffers.first_mut() {
        *first = first.offset(done).map_err(io::Error::other)?;
    }
    Ok(())
}
