//! An io_uring that can do four things to files that are open; the unsafe code of the engine.
//!
//! Sound whatever its user does: an operation and the memory it works on belong to the ring until the
//! kernel has answered, and a ring that is dropped waits for what is out.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, opcode, register::Restriction, squeue};
use vm_memory::VolatileSlice;
use vm_memory::bitmap::Bitmap as _;
use vmm_sys_util::eventfd::EventFd;

use super::{Finished, Op, Target};
use crate::sys::{Clear, IOV_MAX};

/// A ring and everything that is out with the kernel.
pub struct Ring {
    ring: IoUring,
    under_way: HashMap<u16, Entry>,
    // What never got as far as the kernel.
    refused: VecDeque<Finished>,
    capacity: usize,
    // Named in each entry rather than registered: the kernel lets go of registered files some time after
    // their ring is gone, and with them of the image's lock.
    file: OwnedFd,
}

/// An operation and the list of its buffers, which the kernel may read until it has answered.
struct Entry {
    op: Op,
    iovecs: Vec<libc::iovec>,
}

// SAFETY: the pointers in `iovecs` are only ever read by the kernel, and point into memory that the entry
// owns; which thread holds the entry makes no difference.
unsafe impl Send for Entry {}

impl Ring {
    /// A ring that can read, write, sync and clear and nothing else, and writes `event` when something has
    /// ended. A ring that could open files would be a way around every filter on system calls.
    pub fn new(entries: u32, file: &File, event: &Arc<EventFd>) -> io::Result<Self> {
        let ring = IoUring::builder().setup_r_disabled().build(entries)?;
        if !ring.params().is_feature_nodrop() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let submitter = ring.submitter();
        submitter.register_eventfd(event.as_raw_fd())?;
        let ops = [
            opcode::Readv::CODE,
            opcode::Writev::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
        ];
        submitter.register_restrictions(&mut ops.map(Restriction::sqe_op))?;
        submitter.register_enable_rings()?;
        let (under_way, refused) = (HashMap::new(), VecDeque::new());
        let file = file.try_clone()?.into();
        Ok(Self { ring, under_way, refused, capacity: entries as usize, file })
    }

    pub fn has_room(&self) -> bool {
        self.under_way.len() < self.capacity
    }

    /// Whether nothing is out and nothing waits to be fetched.
    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty() && self.refused.is_empty()
    }

    #[cfg(test)]
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Prepares an operation; `submit` hands it over.
    pub fn start(&mut self, token: u16, op: Op) {
        if self.under_way.contains_key(&token) || !self.has_room() {
            // Taking it on would let go of memory that the kernel still uses.
            let result = Err(io::ErrorKind::ResourceBusy.into());
            return self.refused.push_back(Finished { token, op, result });
        }
        let mut entry = Entry { op, iovecs: Vec::new() };
        let prepared = match prepare(&mut entry, Fd(self.file.as_raw_fd())) {
            Ok(prepared) => prepared.user_data(token.into()),
            Err(error) => {
                let Entry { op, .. } = entry;
                return self.refused.push_back(Finished { token, op, result: Err(error) });
            }
        };
        // SAFETY: the buffers and their list belong to the entry, which stays in `under_way` until the
        // kernel has answered; moving the entry moves neither of them. The file is open as long as the ring.
        if unsafe { self.ring.submission().push(&prepared) }.is_err() {
            let result = Err(io::ErrorKind::ResourceBusy.into());
            return self.refused.push_back(Finished { token, op: entry.op, result });
        }
        self.under_way.insert(token, entry);
    }

    /// Hands over what was prepared. What the kernel does not take now it takes next time.
    pub fn submit(&mut self) -> io::Result<()> {
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        ignore_interruption(self.ring.submit())
    }

    /// Hands over what was prepared and waits until `count` have ended, or all that are out.
    pub fn wait(&mut self, count: usize) -> io::Result<()> {
        let ready = self.ring.completion().len();
        let count = count.min(self.under_way.len());
        if !self.refused.is_empty() || count <= ready && self.ring.submission().is_empty() {
            return Ok(());
        }
        ignore_interruption(self.ring.submit_and_wait(count))
    }

    pub fn finished(&mut self) -> Option<Finished> {
        if let Some(finished) = self.refused.pop_front() {
            return Some(finished);
        }
        let answer = self.ring.completion().next()?;
        // The kernel gives back what it was given, a token.
        let token = answer.user_data() as u16;
        let Entry { mut op, .. } = self.under_way.remove(&token)?;
        let result = usize::try_from(answer.result())
            .map_err(|_| io::Error::from_raw_os_error(-answer.result()));
        if let (Op::Read { into, .. }, Ok(done)) = (&mut op, &result) {
            mark_dirty(into, *done);
        }
        Some(Finished { token, op, result })
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel may still write to memory that is ours to free.
        while !self.under_way.is_empty() {
            if let Err(error) = self.wait(1) {
                log::error!("io_uring: {} operations are lost: {error}", self.under_way.len());
                // Better never freed than written to by a kernel that believes it is still there.
                std::mem::forget(std::mem::take(&mut self.under_way));
                return;
            }
            while self.finished().is_some() {}
        }
    }
}

fn prepare(entry: &mut Entry, file: Fd) -> io::Result<squeue::Entry> {
    let Entry { op, iovecs } = entry;
    Ok(match op {
        Op::Read { into, offset } => {
            *iovecs = list(into)?;
            let len = iovecs.len() as u32;
            opcode::Readv::new(file, iovecs.as_ptr(), len).offset(*offset).build()
        }
        Op::Write { from, offset } => {
            *iovecs = list(from)?;
            let len = iovecs.len() as u32;
            opcode::Writev::new(file, iovecs.as_ptr(), len).offset(*offset).build()
        }
        Op::Sync => opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build(),
        Op::Clear { how, offset, len } => {
            let mode = libc::FALLOC_FL_KEEP_SIZE
                | match how {
                    Clear::Punch => libc::FALLOC_FL_PUNCH_HOLE,
                    Clear::Zero => libc::FALLOC_FL_ZERO_RANGE,
                };
            opcode::Fallocate::new(file, *len).offset(*offset).mode(mode).build()
        }
    })
}

/// Where the buffers of a transfer are.
fn list(target: &mut Target) -> io::Result<Vec<libc::iovec>> {
    let slices = target.slices()?;
    let describe = |slice: &VolatileSlice| {
        // The guard ends here; what keeps the memory mapped is that the target is owned by the ring.
        let (base, iov_len) = (slice.ptr_guard_mut().as_ptr(), slice.len());
        libc::iovec { iov_base: base.cast(), iov_len }
    };
    Ok(slices.iter().take(IOV_MAX).map(describe).collect())
}

/// The kernel wrote behind the bitmap's back.
fn mark_dirty(target: &mut Target, done: usize) {
    let Ok(slices) = target.slices() else { return };
    let mut left = done;
    for slice in slices {
        let here = left.min(slice.len());
        slice.bitmap().mark_dirty(0, here);
        left -= here;
    }
}

fn ignore_interruption(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        result => result.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_refuses_what_it_was_not_made_for() {
        let file = tempfile::tempfile().unwrap();
        let event = Arc::new(EventFd::new(0).unwrap());
        let mut ring = Ring::new(4, &file, &event).unwrap();
        let path = c"/etc/passwd";
        let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), path.as_ptr()).build();
        for entry in [open, opcode::Nop::new().build()] {
            // SAFETY: the path outlives the answer, for which this waits.
            unsafe { ring.ring.submission().push(&entry) }.unwrap();
            // Newer kernels answer the call itself with the error.
            let _ = ring.ring.submit_and_wait(1);
            let answer = ring.ring.completion().next().unwrap();
            assert_eq!(answer.result(), -libc::EACCES);
        }
    }
}
