//! A mount namespace of the process's own, which needs `unsafe`.
#![allow(unsafe_code)] // unshare(2).

use rustix::io::Errno;
use rustix::thread::UnshareFlags;

/// Gives the calling thread, and those that it starts, mounts of their own.
pub fn unshare_mounts() -> Result<(), Errno> {
    // SAFETY: of all that can be unshared only the descriptor table endangers memory or files.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }
}
