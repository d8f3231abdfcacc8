//! System calls that the standard library does not offer.
//!
//! Kept together so that the rest of the crate needs no unsafe code.
#![allow(unsafe_code)] // Leases have no safe form.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{CWD, FlockOperation, RenameFlags, SeekFrom};
use rustix::io::Errno;

/// Takes an exclusive lock if it is free; it is released when the file is closed in any way.
pub(crate) fn try_lock(file: &File) -> io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// `F_SETSIG` of `fcntl.h`, which the libc crate lacks.
const F_SETSIG: libc::c_int = 10;

/// Opens a file that no process has open, this one included; `None` if one has. Whoever opens the
/// file after that waits until the returned file is closed.
pub(crate) fn claim_unused(path: &Path) -> io::Result<Option<File>> {
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    // An ignored signal in the place of SIGIO, which would end the process when another one waits.
    // SAFETY: these calls take no pointer; the descriptor is open.
    let done = unsafe {
        libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG) == 0
            && libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) == 0
    };
    match io::Error::last_os_error() {
        _ if done => Ok(Some(file)),
        error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        error => Err(error),
    }
}

/// Exchanges two paths atomically, so that no reader finds either missing.
pub(crate) fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

/// Makes `to` share the blocks of `from`; fails if the filesystem does not support it.
pub(crate) fn reflink(from: &File, to: &File) -> io::Result<()> {
    Ok(rustix::fs::ioctl_ficlone(to, from)?)
}

/// Returns the next data range at or after `from` as (start, end); `None` if only a hole follows.
pub(crate) fn next_data(file: &File, from: u64) -> io::Result<Option<(u64, u64)>> {
    let Some(start) = seek(file, SeekFrom::Data(from))? else { return Ok(None) };
    let end = seek(file, SeekFrom::Hole(start))?;
    Ok(end.map(|end| (start, end)))
}

fn seek(file: &File, to: SeekFrom) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, to) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns the bytes that an ordinary user may still write to the filesystem of `path`.
pub(crate) fn free_bytes(path: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(path)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}
