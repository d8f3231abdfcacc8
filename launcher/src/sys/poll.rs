//! Waiting for several descriptors at once, always with a deadline.
//!
//! The VMM process and the verbs wait for signals, pipes and the machine's end in one place each; this
//! is the one call they share.
#![allow(unsafe_code)] // poll(2).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Waits until one is readable or hung up; the answer says which. All false: the time is over.
pub fn readable(fds: &[BorrowedFd<'_>], patience: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut polled: Vec<libc::pollfd> = fds
        .iter()
        .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
        .collect();
    let timeout = match patience {
        // Rounded up: a wait that ends early would spin until its deadline.
        Some(patience) => patience.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32,
        None => -1,
    };
    // SAFETY: `polled` is a live array of exactly that many entries, and every descriptor is borrowed.
    let count = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, timeout) };
    if count < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(polled.iter().map(|entry| count > 0 && entry.revents != 0).collect())
}
