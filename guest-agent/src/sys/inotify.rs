//! inotify, which reports changes in directories.
//!
//! The standard library has no inotify; its events are parsed here as well.

use std::ffi::{CString, OsStr};
use std::io::Result;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{check, own};

/// The events that are reported for a directory.
const MASK: u32 = libc::IN_CREATE
    | libc::IN_MODIFY
    | libc::IN_CLOSE_WRITE
    | libc::IN_ATTRIB
    | libc::IN_DELETE
    | libc::IN_DELETE_SELF
    | libc::IN_MOVED_FROM
    | libc::IN_MOVED_TO
    | libc::IN_MOVE_SELF
    | libc::IN_EXCL_UNLINK
    | libc::IN_DONT_FOLLOW;

pub struct Inotify(OwnedFd);

impl Inotify {
    pub fn new() -> Result<Self> {
        // SAFETY: takes no pointer.
        own(unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) }).map(Self)
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.0
    }

    /// Watches a path and returns the number that its events carry.
    pub fn add(&self, path: &Path) -> Result<i32> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: a C string that outlives the call.
        check(unsafe { libc::inotify_add_watch(self.0.as_raw_fd(), path.as_ptr(), MASK) })
    }

    pub fn remove(&self, number: i32) {
        // SAFETY: takes no pointer; an unknown number is refused, which is fine.
        unsafe { libc::inotify_rm_watch(self.0.as_raw_fd(), number) };
    }
}

/// One event as the kernel wrote it.
pub struct RawEvent<'a> {
    pub watch: i32,
    pub mask: u32,
    pub cookie: u32,
    /// Empty for an event of the watched path itself.
    pub name: &'a [u8],
}

impl RawEvent<'_> {
    pub fn file_name(&self) -> &OsStr {
        OsStr::from_bytes(self.name)
    }
}

/// Parses the bytes of a read: watch, mask, cookie, length, and a name padded with zeroes.
pub fn events(mut bytes: &[u8]) -> Vec<RawEvent<'_>> {
    let mut events = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<16>() {
        let word =
            |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let Some((name, rest)) = rest.split_at_checked(word(12) as usize) else { break };
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        events.push(RawEvent {
            watch: word(0) as i32,
            mask: word(4),
            cookie: word(8),
            name: &name[..end],
        });
        bytes = rest;
    }
    events
}
