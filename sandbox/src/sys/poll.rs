//! Waits for several file descriptors at once, with an optional timeout.
//!
//! The event loops of the monitor process and of the commands use it to wait for signals, pipes and
//! the VM's end.
#![allow(unsafe_code)] // poll(2).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Waits as [`readable`] for a fixed set of optional descriptors; an absent one is never ready.
pub fn readable_of<const N: usize>(
    fds: [Option<BorrowedFd<'_>>; N],
    patience: Option<Duration>,
) -> io::Result<[bool; N]> {
    let present: Vec<_> = fds.iter().flatten().copied().collect();
    let mut ready = readable(&present, patience)?.into_iter();
    Ok(fds.map(|fd| fd.is_some() && ready.next().unwrap_or(false)))
}

/// Borrows the descriptor of a type that only implements `AsRawFd`.
pub fn borrowed<T: AsRawFd>(of: &T) -> BorrowedFd<'_> {
    // SAFETY: `of` owns the descriptor and is borrowed for as long as the result.
    unsafe { BorrowedFd::borrow_raw(of.as_raw_fd()) }
}

/// Waits until a descriptor is readable or hung up, and returns which are. None is on timeout or
/// interrupt.
pub fn readable(fds: &[BorrowedFd<'_>], patience: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut polled: Vec<libc::pollfd> = fds
        .iter()
        .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
        .collect();
    let timeout = milliseconds(patience);
    // SAFETY: `polled` is a live array of exactly that many entries, and every descriptor is
    // borrowed.
    let count = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, timeout) };
    if count < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    Ok(polled.iter().map(|entry| count > 0 && entry.revents != 0).collect())
}

/// The events to wait for on a file descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    Read,
    Write,
    /// Only hang-up or error.
    Nothing,
}

/// The events that have happened on a file descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    pub read: bool,
    pub write: bool,
    /// The peer is gone, or the descriptor is broken.
    pub gone: bool,
}

/// Waits until a descriptor is ready for what is wanted of it. None is on timeout or interrupt.
pub fn wait(
    wants: &[(BorrowedFd<'_>, Want)],
    patience: Option<Duration>,
) -> io::Result<Vec<Ready>> {
    let events = |want| match want {
        Want::Read => libc::POLLIN,
        Want::Write => libc::POLLOUT,
        Want::Nothing => 0,
    };
    let mut polled: Vec<libc::pollfd> = wants
        .iter()
        .map(|(fd, want)| libc::pollfd { fd: fd.as_raw_fd(), events: events(*want), revents: 0 })
        .collect();
    // SAFETY: `polled` is a live array of exactly that many entries, and every descriptor is
    // borrowed.
    let count = unsafe {
        libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds(patience))
    };
    if count < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    let ready = |entry: &libc::pollfd| {
        let has = |bits| count > 0 && entry.revents & bits != 0;
        let gone = has(libc::POLLHUP | libc::POLLERR | libc::POLLNVAL);
        Ready { read: has(libc::POLLIN), write: has(libc::POLLOUT), gone }
    };
    Ok(polled.iter().map(ready).collect())
}

/// Converts to milliseconds, rounded up: a wait that ends early would spin until its deadline.
fn milliseconds(patience: Option<Duration>) -> i32 {
    match patience {
        Some(patience) => patience.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32,
        None => -1,
    }
}

/// Waits until `fd` is writable.
pub fn writable(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut polled = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: `polled` is one live entry, and its descriptor is borrowed.
    match unsafe { libc::poll(&mut polled, 1, -1) } {
        -1 if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted => {
            Err(io::Error::last_os_error())
        }
        _ => Ok(()),
    }
}
