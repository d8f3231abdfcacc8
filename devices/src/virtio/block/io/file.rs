//! A disk on a regular file or block device of the host, through the page cache.
//!
//! Opened once and locked before the machine starts; nothing is ever opened on a guest's behalf.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use vm_memory::VolatileSlice;

use super::super::config::Source;
use super::super::wire::SECTOR_SIZE;
use super::{Clear, DiskIo};
use crate::sys;

// Larger than any host file system of today lets a useful image be; a sparse file beyond it is a mistake.
const SIZE_MAX: u64 = 64 << 40;

/// Why a file cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("is a symbolic link; name the file itself")]
    Symlink,
    #[error("is neither a regular file nor a block device")]
    Kind,
    #[error("is {size} bytes, which is not between one sector and {SIZE_MAX} bytes")]
    Size { size: u64 },
    #[error("is in use by another machine")]
    Locked,
    #[error("cannot {act} it")]
    Access {
        act: &'static str,
        #[source]
        source: io::Error,
    },
}

/// An open, locked image.
#[derive(Debug)]
pub struct FileDisk {
    file: File,
    capacity_sectors: u64,
}

impl FileDisk {
    /// Opens or takes over the file, checks that it can be a disk, and locks it: a writer alone,
    /// readers together.
    pub fn open(source: Source, read_only: bool) -> Result<Self, OpenError> {
        let mut file = match source {
            Source::Path(path) => open(&path, read_only)?,
            Source::File(file) => file,
            // Layers are a disk of their own.
            Source::Layers(_) => return Err(OpenError::Kind),
        };
        let access = |act| move |source| OpenError::Access { act, source };
        let kind = file.metadata().map_err(access("examine"))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(OpenError::Kind);
        }
        // The one way to learn the size of both kinds; positioned I/O does not use the cursor.
        let size = file.seek(SeekFrom::End(0)).map_err(access("measure"))?;
        if !(SECTOR_SIZE..=SIZE_MAX).contains(&size) {
            return Err(OpenError::Size { size });
        }
        sys::lock(&file, !read_only).map_err(|source| match source.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => OpenError::Locked,
            _ => OpenError::Access { act: "lock", source },
        })?;
        Ok(Self { file, capacity_sectors: size / SECTOR_SIZE })
    }

    pub fn capacity_sectors(&self) -> u64 {
        self.capacity_sectors
    }
}

fn open(path: &Path, read_only: bool) -> Result<File, OpenError> {
    // Not blocking matters for a FIFO only, which is then refused instead of waited for.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let mut options = OpenOptions::new();
    options.read(true).write(!read_only).custom_flags(flags);
    options.open(path).map_err(|source| match source.raw_os_error() {
        Some(libc::ELOOP) => OpenError::Symlink,
        // A directory or a FIFO without a reader, asked for writing.
        Some(libc::EISDIR | libc::ENXIO) => OpenError::Kind,
        _ => OpenError::Access { act: "open", source },
    })
}

impl DiskIo for FileDisk {
    fn read(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize> {
        sys::preadv(self.file.as_fd(), buffers, offset)
    }

    fn write(&self, buffers: &[VolatileSlice], offset: u64) -> io::Result<usize> {
        sys::pwritev(self.file.as_fd(), buffers, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn clear(&self, how: Clear, offset: u64, len: u64) -> io::Result<()> {
        sys::fallocate(self.file.as_fd(), how, offset, len)
    }
}
