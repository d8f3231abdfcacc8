//! System calls that a long build needs and for which the standard library has no function.
//!
//! All `unsafe` code of the kernel build is in this file.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note_interrupt(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Makes the first SIGINT, SIGTERM or SIGHUP set a flag, so that the build tree can be removed. The
/// second signal of a kind ends the process.
pub fn catch_interrupts() -> io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores to an atomic; a zeroed sigaction is valid.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note_interrupt as *const () as usize;
            action.sa_flags = libc::SA_RESETHAND;
            libc::sigaction(signal, &action, std::ptr::null_mut())
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Returns whether a signal of [`catch_interrupts`] has arrived.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Takes an exclusive lock on `file`. Returns false if another process holds it.
pub fn try_lock(file: &File) -> io::Result<bool> {
    // SAFETY: flock takes two integers.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        e if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
        e => Err(e),
    }
}

/// Sends `signal` to every process of the group of `leader`.
pub fn kill_group(leader: u32, signal: libc::c_int) {
    let Ok(group) = libc::pid_t::try_from(leader) else { return };
    // SAFETY: kill takes two integers. It may fail if the group has ended, which is the intended
    // result.
    unsafe { libc::kill(-group, signal) };
}

/// Returns whether this process is root and may install packages.
pub fn is_root() -> bool {
    // SAFETY: geteuid takes nothing and cannot fail.
    unsafe { libc::geteuid() == 0 }
}
