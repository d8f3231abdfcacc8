//! System calls that the standard library does not offer.
//!
//! Kept together so that the rest of the crate needs no unsafe code.
#![allow(unsafe_code)] // flock, leases, renameat2, FICLONE, SEEK_DATA and statvfs have no safe form in std.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Takes an exclusive lock if it is free; it is released when the file is closed in any way.
pub(crate) fn try_lock(file: &File) -> io::Result<bool> {
    // SAFETY: flock takes no pointer; the descriptor is open for as long as `file` is borrowed.
    match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
        0 => Ok(true),
        _ => match io::Error::last_os_error() {
            err if err.kind() == io::ErrorKind::WouldBlock => Ok(false),
            err => Err(err),
        },
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
    let (a, b) = (c_path(a)?, c_path(b)?);
    // SAFETY: both strings end in NUL and outlive the call.
    let done = unsafe {
        libc::renameat2(
            libc::AT_FDCWD,
            a.as_ptr(),
            libc::AT_FDCWD,
            b.as_ptr(),
            libc::RENAME_EXCHANGE,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes `to` share the blocks of `from`; fails if the filesystem does not support it.
pub(crate) fn reflink(from: &File, to: &File) -> io::Result<()> {
    // SAFETY: FICLONE's argument is a descriptor, passed by value; both are open.
    let done = unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE, from.as_raw_fd()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the next data range at or after `from` as (start, end); `None` if only a hole follows.
pub(crate) fn next_data(file: &File, from: u64) -> io::Result<Option<(u64, u64)>> {
    let Some(start) = seek(file, from, libc::SEEK_DATA)? else { return Ok(None) };
    let end = seek(file, start, libc::SEEK_HOLE)?;
    Ok(end.map(|end| (start, end)))
}

fn seek(file: &File, from: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    let from = i64::try_from(from).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: lseek takes no pointer; the descriptor is open.
    let at = unsafe { libc::lseek(file.as_raw_fd(), from, whence) };
    match u64::try_from(at) {
        Ok(at) => Ok(Some(at)),
        Err(_) => match io::Error::last_os_error() {
            err if err.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            err => Err(err),
        },
    }
}

/// Returns the bytes that an ordinary user may still write to the filesystem of `path`.
pub(crate) fn free_bytes(path: &Path) -> io::Result<u64> {
    let path = c_path(path)?;
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the string ends in NUL, and statvfs writes one whole structure or fails.
    if unsafe { libc::statvfs(path.as_ptr(), found.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the structure is filled.
    let found = unsafe { found.assume_init() };
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "the path has a NUL byte"))
}
