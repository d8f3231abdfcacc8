//! System calls for the thread of an interpreter call: a socket pair, a watch on a process, poll.
//!
//! The thread waits for a few descriptors at once, outside the agent's event loop.

use std::io::Result;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::{check, own, set_nonblocking};

/// Makes a socket pair: the agent's end, non-blocking, and the process's end, above every standard
/// descriptor.
pub fn control_pair() -> Result<(OwnedFd, OwnedFd)> {
    const ABOVE: libc::c_int = 16;
    let mut ends = [-1; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: `ends` has room for the two descriptors.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) })?;
    // SAFETY: socketpair has made both for the agent.
    let (ours, theirs) = unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
    set_nonblocking(&ours)?;
    // SAFETY: takes no pointer.
    let theirs = own(unsafe { libc::fcntl(theirs.as_raw_fd(), libc::F_DUPFD_CLOEXEC, ABOVE) })?;
    Ok((ours, theirs))
}

/// Returns a descriptor that is readable once the process is dead.
pub fn process_watch(pid: libc::pid_t) -> Result<OwnedFd> {
    // SAFETY: takes no pointer.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    own(fd as libc::c_int)
}

/// A descriptor and the events to wait for. An error on it is always reported.
pub struct Interest<'a> {
    pub fd: &'a OwnedFd,
    pub read: bool,
    pub write: bool,
}

impl<'a> Interest<'a> {
    pub fn read(fd: &'a OwnedFd) -> Self {
        Self { fd, read: true, write: false }
    }

    pub fn write(fd: &'a OwnedFd) -> Self {
        Self { fd, read: false, write: true }
    }
}

/// Waits for one of the descriptors, without a timeout forever, and returns which are ready.
pub fn wait(interest: &[Interest<'_>], timeout: Option<Duration>) -> Result<Vec<bool>> {
    let mut polled: Vec<libc::pollfd> = interest
        .iter()
        .map(|it| {
            let read = if it.read { libc::POLLIN } else { 0 };
            let write = if it.write { libc::POLLOUT } else { 0 };
            libc::pollfd { fd: it.fd.as_raw_fd(), events: read | write, revents: 0 }
        })
        .collect();
    let millis = timeout.map_or(-1, |left| {
        left.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as libc::c_int
    });
    // SAFETY: the array lives through the call with the length passed.
    let result = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, millis) };
    match check(result) {
        Err(e) if e.raw_os_error() != Some(libc::EINTR) => Err(e),
        _ => Ok(polled.iter().map(|it| it.revents != 0).collect()),
    }
}
