//! A disk whose image is opened later: it has a size, and every operation on it fails.
//!
//! A machine restored from a snapshot stays paused until its owner resumes it. Until then its disk
//! may still be replaced, so the first image need not exist.

use std::io;

use vm_memory::VolatileSlice;

use super::plain::MeasuredDisk;
use super::{Clear, DiskIo};

/// A disk of `size` bytes that refuses every operation.
pub struct Absent {
    pub size: u64,
}

impl DiskIo for Absent {
    fn read(&self, _buffers: &[VolatileSlice], _offset: u64) -> io::Result<usize> {
        Err(refused())
    }

    fn write(&self, _buffers: &[VolatileSlice], _offset: u64) -> io::Result<usize> {
        Err(refused())
    }

    fn sync(&self) -> io::Result<()> {
        Err(refused())
    }

    fn clear(&self, _how: Clear, _offset: u64, _len: u64) -> io::Result<()> {
        Err(refused())
    }
}

impl MeasuredDisk for Absent {
    fn measure(&self) -> io::Result<u64> {
        Ok(self.size)
    }
}

fn refused() -> io::Error {
    io::Error::other("the disk is not open yet")
}
