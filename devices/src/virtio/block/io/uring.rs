//! The engine on io_uring: the device thread submits operations and never waits for a disk.
//!
//! A slow disk therefore delays nothing else on the device thread.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::sys::Ring;
use super::{Engine, FileDisk, Finished, Op};

// As many as a queue can hold, so that a guest never waits for a free entry.
const ENTRIES: u32 = super::super::device::QUEUE_SIZE as u32;

/// A disk with a ring of its own.
pub struct Uring {
    ring: Ring,
    disk: FileDisk,
    // For tests that need to know when everything has completed: `submit` then waits for it.
    #[cfg(test)]
    pub(in super::super) settles: bool,
}

impl Uring {
    /// Creates the ring. Fails where the host has no io_uring, forbids it, or has one that cannot
    /// be restricted.
    pub fn new(disk: &FileDisk, event: &Arc<EventFd>) -> io::Result<Self> {
        let disk = disk.try_clone()?;
        Ok(Self {
            ring: Ring::new(ENTRIES, disk.file(), event)?,
            disk,
            #[cfg(test)]
            settles: false,
        })
    }
}

impl Engine for Uring {
    fn start(&mut self, token: u16, op: Op) {
        self.ring.start(token, op);
    }

    fn has_room(&self) -> bool {
        self.ring.has_room()
    }

    fn submit(&mut self) -> io::Result<()> {
        #[cfg(test)]
        if self.settles {
            return self.ring.wait(self.ring.under_way());
        }
        self.ring.submit()
    }

    fn finished(&mut self) -> Option<Finished> {
        self.ring.finished()
    }

    fn wait(&mut self) -> io::Result<()> {
        if self.ring.is_idle() {
            return Err(io::ErrorKind::NotFound.into());
        }
        self.ring.wait(1)
    }

    fn measure(&self) -> io::Result<u64> {
        self.disk.size()
    }
}
