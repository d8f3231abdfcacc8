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
    let mut entries: Vec<_> = fds.iter().map(|fd| entry(*fd, libc::POLLIN)).collect();
    poll(&mut entries, patience)?;
    Ok(entries.iter().map(|entry| entry.revents != 0).collect())
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
    let mut entries: Vec<_> = wants.iter().map(|(fd, want)| entry(*fd, events(*want))).collect();
    poll(&mut entries, patience)?;
    let ready = |entry: &libc::pollfd| {
        let has = |bits| entry.revents & bits != 0;
        let gone = has(libc::POLLHUP | libc::POLLERR | libc::POLLNVAL);
        Ready { read: has(libc::POLLIN), write: has(libc::POLLOUT), gone }
    };
    Ok(entries.iter().map(ready).collect())
}

/// Waits until `fd` is writable.
pub fn writable(fd: BorrowedFd<'_>) -> io::Result<()> {
    poll(&mut [entry(fd, libc::POLLOUT)], None)
}

fn entry(fd: BorrowedFd<'_>, events: libc::c_short) -> libc::pollfd {
    libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 }
}

/// Waits for the events of entries, whose descriptors are open. None is set on timeout or
/// interrupt.
fn poll(entries: &mut [libc::pollfd], patience: Option<Duration>) -> io::Result<()> {
    let (first, count) = (entries.as_mut_ptr(), entries.len() as libc::nfds_t);
    // SAFETY: `entries` is a live array of exactly that many entries. Not by rustix, which calls
    // ppoll: the system call filters of the monitor name poll.
    if unsafe { libc::poll(first, count, milliseconds(patience)) } >= 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) }
}

/// Converts to milliseconds, rounded up: a wait that ends early would spin until its deadline.
fn milliseconds(patience: Option<Duration>) -> i32 {
    match patience {
        Some(patience) => patience.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32,
        None => -1,
    }
}
