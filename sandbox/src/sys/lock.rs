//! Advisory file locks that are held as long as a process lives.
//!
//! A VM is alive exactly while its lock is held: the kernel releases it however the process ends,
//! so it cannot go stale.

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

/// Takes the lock if it is free; returns false if not.
pub fn try_exclusive(file: &File) -> io::Result<bool> {
    flock(file, FlockOperation::NonBlockingLockExclusive)
}

/// A lock that is released on drop, also if a process that was forked meanwhile still has the file
/// open.
#[derive(Debug)]
pub struct Guard(File);

impl Guard {
    /// Takes charge of a lock that `file` holds.
    pub fn of(file: File) -> Self {
        Self(file)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // The kernel refuses it for no file that is open.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Takes the lock beside other shared ones, unless one process has it alone; returns false then.
pub fn try_shared(file: &File) -> io::Result<bool> {
    flock(file, FlockOperation::NonBlockingLockShared)
}

/// Whether the lock is free. The check takes a shared lock, so concurrent checks do not disturb it.
pub fn is_free(file: &File) -> io::Result<bool> {
    flock(file, FlockOperation::NonBlockingLockShared)
}

fn flock(file: &File, kind: FlockOperation) -> io::Result<bool> {
    match rustix::fs::flock(file, kind) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Takes the lock, waiting no longer than `patience`; returns false if it is still held then.
pub fn exclusive(file: &File, patience: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + patience;
    let mut pause = Duration::from_millis(1);
    loop {
        if try_exclusive(file)? {
            return Ok(true);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        // flock has no timeout; the pause grows so that a long wait costs little.
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guard_dropped_while_a_copy_of_its_file_is_open_releases_the_lock() {
        let _alone = crate::sys::probe::without_forks();
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(file.path()).unwrap();
        let held = open();
        assert!(try_exclusive(&held).unwrap());
        // As a child process that was forked without exec holds it.
        let _copy = held.try_clone().unwrap();
        assert!(!try_exclusive(&open()).unwrap());
        drop(Guard::of(held));
        assert!(try_exclusive(&open()).unwrap());
    }
}
