//! A regular file or block device of the host as a disk, with or without the page cache.
//!
//! The file is opened and locked once, before the machine starts; no file is ever opened on a
//! guest's behalf.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use vm_memory::VolatileSlice;

use super::super::config::Source;
use super::super::wire::SECTOR_SIZE;
use super::plain::MeasuredDisk;
use super::{Clear, DiskIo};
use crate::sys;

// Larger than a useful image on any host file system of today; a larger sparse file is a mistake.
const SIZE_MAX: u64 = 64 << 40;
const PAGE_SIZE: u32 = 4096;

/// Why a file cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("is a symbolic link; name the file itself")]
    Symlink,
    #[error("is neither a regular file nor a block device")]
    Kind,
    #[error("is {size} bytes, which is more than {SIZE_MAX}")]
    Size { size: u64 },
    #[error("is in use: another machine has it open{}", if *.read_only { " for writing" } else { "" })]
    Locked { read_only: bool },
    #[error("wants io_uring, which this host does not offer; use engine=plain or engine=auto")]
    IoUring {
        #[source]
        source: io::Error,
    },
    #[error("is made of layers, which have neither io_uring nor direct I/O")]
    Layers,
    #[error("needs direct I/O in units of {align} bytes, which is more than a page")]
    Alignment { align: u32 },
    #[error("cannot {act} it")]
    Access {
        act: &'static str,
        #[source]
        source: io::Error,
    },
}

/// How an image is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    pub read_only: bool,
    /// Bypass the host's page cache.
    pub direct: bool,
}

/// An open, locked image.
#[derive(Debug)]
pub struct FileDisk {
    file: File,
    block_size: u32,
}

impl FileDisk {
    /// Opens or takes over the file, checks that it can be a disk, and locks it: exclusively for a
    /// writer, shared for readers.
    pub fn open(source: Source, access: Access) -> Result<Self, OpenError> {
        let Access { read_only, direct } = access;
        let file = match source {
            Source::Path(path) => open(&path, read_only)?,
            Source::File(file) => file,
            // These sources have their own disk types.
            Source::Layers(_) | Source::Later { .. } => return Err(OpenError::Kind),
        };
        let failed = |act| move |source| OpenError::Access { act, source };
        let kind = file.metadata().map_err(failed("examine"))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(OpenError::Kind);
        }
        // This also clears O_APPEND, which would redirect writes to the end of the file.
        sys::set_direct(&file, direct).map_err(failed("use direct I/O on"))?;
        let block_size = if direct { direct_unit(&file)? } else { SECTOR_SIZE as u32 };
        let disk = Self { file, block_size };
        let size = disk.size().map_err(failed("measure"))?;
        // An image smaller than a sector is a disk without sectors, which may be replaced later.
        if size > SIZE_MAX {
            return Err(OpenError::Size { size });
        }
        sys::lock(&disk.file, !read_only).map_err(|source| match source.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => OpenError::Locked { read_only },
            _ => OpenError::Access { act: "lock", source },
        })?;
        Ok(disk)
    }

    /// Returns the unit of all transfers: a sector, or the alignment of direct I/O.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Returns the current size of the file or device.
    pub fn size(&self) -> io::Result<u64> {
        // Seeking works for both files and block devices; positioned I/O does not use the cursor.
        (&self.file).seek(SeekFrom::End(0))
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Wraps a file that a test has opened, without locking it.
    #[cfg(test)]
    pub fn unlocked(file: File) -> Self {
        Self { file, block_size: SECTOR_SIZE as u32 }
    }

    /// Returns another owner of this open, locked file.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, block_size: self.block_size })
    }
}

/// Returns the alignment that direct I/O requires of addresses, positions and lengths.
fn direct_unit(file: &File) -> Result<u32, OpenError> {
    // Where the host does not report one, a page is always enough.
    let align = sys::direct_alignment(file).unwrap_or(PAGE_SIZE).max(SECTOR_SIZE as u32);
    if align > PAGE_SIZE || !align.is_power_of_two() {
        return Err(OpenError::Alignment { align });
    }
    Ok(align)
}

fn open(path: &Path, read_only: bool) -> Result<File, OpenError> {
    // O_NONBLOCK only matters for a FIFO, which is then refused instead of waited for.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let mut options = OpenOptions::new();
    options.read(true).write(!read_only).custom_flags(flags);
    options.open(path).map_err(|source| match source.raw_os_error() {
        Some(libc::ELOOP) => OpenError::Symlink,
        // A directory, or a FIFO without a reader, opened for writing.
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

impl MeasuredDisk for FileDisk {
    fn measure(&self) -> io::Result<u64> {
        self.size()
    }
}
