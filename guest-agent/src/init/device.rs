//! Waits for a block device to appear in /dev.
//!
//! Drivers find their devices asynchronously; inotify reports when a node is made.
#![allow(unsafe_code)] // inotify and poll

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::sys::{self, check};

/// Waits until the path exists, and returns whether it did in time.
pub fn wait_for(path: &str, patience: Duration) -> io::Result<bool> {
    if Path::new(path).exists() {
        return Ok(true);
    }
    let deadline = Instant::now() + patience;
    let watch = watch_dev()?;
    // Checked again after the watch has begun, so that no node is missed in between.
    while !Path::new(path).exists() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        let mut poll = libc::pollfd { fd: watch.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let millis = left.as_millis().min(1000) as libc::c_int + 1;
        // SAFETY: one pollfd that outlives the call.
        unsafe { libc::poll(&mut poll, 1, millis) };
        let _ = sys::read_onto(&watch, &mut Vec::new(), 4096);
    }
    Ok(true)
}

fn watch_dev() -> io::Result<OwnedFd> {
    // SAFETY: a new descriptor that is owned here, and a path literal.
    unsafe {
        let fd = check(libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK))?;
        let fd = OwnedFd::from_raw_fd(fd);
        check(libc::inotify_add_watch(fd.as_raw_fd(), c"/dev".as_ptr(), libc::IN_CREATE))?;
        Ok(fd)
    }
}
