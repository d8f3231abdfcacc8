//! The three system calls a long build needs and the standard library does not offer.
//!
//! Here so that everything `unsafe` in the kernel build is on one page.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note_interrupt(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// From here on the first Ctrl-C, TERM or HUP only sets a flag, so that the build tree can be
/// removed; the second ends the process as ever.
pub fn catch_interrupts() -> io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores to an atomic; a zeroed sigaction is a valid one.
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

/// Whether one of those signals has arrived.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Takes an exclusive lock on `file` if nobody holds it.
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

/// Sends `signal` to every process of the group that `leader` leads.
pub fn kill_group(leader: u32, signal: libc::c_int) {
    let Ok(group) = libc::pid_t::try_from(leader) else { return };
    // SAFETY: kill takes two integers. A group that is already gone is what was wanted.
    unsafe { libc::kill(-group, signal) };
}

/// Whether this process may install packages.
pub fn is_root() -> bool {
    // SAFETY: geteuid takes nothing and cannot fail.
    unsafe { libc::geteuid() == 0 }
}
