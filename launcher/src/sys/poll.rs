//! Waiting for several descriptors at once, always with a deadline.
//!
//! The VMM process and the verbs wait for signals, pipes and the machine's end in one place each; this
//! is the one call they share.
#![allow(unsafe_code)] // poll(2).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// [`readable`] for a fixed set of which some may be absent; an absent one is never ready.
pub fn readable_of<const N: usize>(
    fds: [Option<BorrowedFd<'_>>; N],
    patience: Option<Duration>,
) -> io::Result<[bool; N]> {
    let present: Vec<_> = fds.iter().flatten().copied().collect();
    let mut ready = readable(&present, patience)?.into_iter();
    Ok(fds.map(|fd| fd.is_some() && ready.next().unwrap_or(false)))
}

/// The descriptor of something that only knows its number.
pub fn borrowed<T: AsRawFd>(of: &T) -> BorrowedFd<'_> {
    // SAFETY: `of` owns the descriptor and is borrowed for as long as the result.
    unsafe { BorrowedFd::borrow_raw(of.as_raw_fd()) }
}

/// Waits until one is readable or hung up; the answer says which. All false: the time is over.
pub fn readable(fds: &[BorrowedFd<'_>], patience: Option<Duration>) -> io::Result<Vec<bool>> {
    let mut polled: Vec<libc::pollfd> = fds
        .iter()
        .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 })
        .collect();
    let timeout = milliseconds(patience);
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

/// What to wait for on a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    Read,
    Write,
    /// Only its end.
    Nothing,
}

/// What a descriptor is ready for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    pub read: bool,
    pub write: bool,
    /// The other side is gone, or the descriptor is broken.
    pub gone: bool,
}

/// Waits until one is ready for what is wanted of it; nothing ready: the time is over.
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
    // SAFETY: `polled` is a live array of exactly that many entries, and every descriptor is borrowed.
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

/// Rounded up: a wait that ends early would spin until its deadline.
fn milliseconds(patience: Option<Duration>) -> i32 {
    match patience {
        Some(patience) => patience.as_micros().div_ceil(1000).min(i32::MAX as u128) as i32,
        None => -1,
    }
}

/// Waits until something can be written.
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
