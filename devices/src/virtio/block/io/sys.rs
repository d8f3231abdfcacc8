//! An io_uring restricted to four operations on one open file; the unsafe code of the engine.
//!
//! It is sound whatever its user does: an operation and its memory belong to the ring until the
//! kernel has completed it, and dropping a ring waits for the operations in flight.
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

/// A ring and the operations in flight in the kernel.
pub struct Ring {
    ring: IoUring,
    under_way: HashMap<u16, Submission>,
    // Operations that failed before they reached the kernel.
    refused: VecDeque<Finished>,
    capacity: usize,
    // Named in each entry rather than registered: the kernel releases registered files, and with
    // them the image's lock, some time after their ring is gone.
    file: OwnedFd,
}

/// An operation and the list of its buffers, which the kernel may read until it has completed.
struct Submission {
    op: Op,
    iovecs: Vec<libc::iovec>,
}

// SAFETY: the pointers in `iovecs` are only ever read by the kernel, and point into memory that the
// entry owns; which thread holds the entry makes no difference.
unsafe impl Send for Submission {}

impl Ring {
    /// Creates a ring that can read, write, sync and clear and nothing else, and writes `event`
    /// when an operation has completed. A ring that could open files would bypass every system call
    /// filter.
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

    /// Returns whether no operation is in flight and no result waits to be fetched.
    pub fn is_idle(&self) -> bool {
        self.under_way.is_empty() && self.refused.is_empty()
    }

    #[cfg(test)]
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Prepares an operation; `submit` passes it to the kernel.
    pub fn start(&mut self, token: u16, op: Op) {
        if self.under_way.contains_key(&token) || !self.has_room() {
            // Accepting it would free memory that the kernel still uses.
            let result = Err(io::ErrorKind::ResourceBusy.into());
            return self.refused.push_back(Finished { token, op, result });
        }
        let mut entry = Submission { op, iovecs: Vec::new() };
        let prepared = match prepare(&mut entry, Fd(self.file.as_raw_fd())) {
            Ok(prepared) => prepared.user_data(token.into()),
            Err(error) => {
                let Submission { op, .. } = entry;
                return self.refused.push_back(Finished { token, op, result: Err(error) });
            }
        };
        // SAFETY: the buffers and their list belong to the entry, which stays in `under_way` until
        // the kernel has completed it; moving the entry moves neither of them. The file is open as
        // long as the ring.
        if unsafe { self.ring.submission().push(&prepared) }.is_err() {
            let result = Err(io::ErrorKind::ResourceBusy.into());
            return self.refused.push_back(Finished { token, op: entry.op, result });
        }
        self.under_way.insert(token, entry);
    }

    /// Submits the prepared operations. Those that the kernel does not accept now are submitted
    /// next time.
    pub fn submit(&mut self) -> io::Result<()> {
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        ignore_interruption(self.ring.submit())
    }

    /// Submits the prepared operations and waits until `count` have completed, or all in flight.
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
        // The kernel returns the user data of the entry, a token.
        let token = answer.user_data() as u16;
        let Submission { mut op, .. } = self.under_way.remove(&token)?;
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
        // The kernel may still write to memory that is about to be freed.
        while !self.under_way.is_empty() {
            if let Err(error) = self.wait(1) {
                log::error!("io_uring: {} operations are lost: {error}", self.under_way.len());
                // Leaked, because the kernel may still write to it.
                std::mem::forget(std::mem::take(&mut self.under_way));
                return;
            }
            while self.finished().is_some() {}
        }
    }
}

fn prepare(entry: &mut Submission, file: Fd) -> io::Result<squeue::Entry> {
    let Submission { op, iovecs } = entry;
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

/// Returns the addresses of the buffers of a transfer.
fn list(target: &mut Target) -> io::Result<Vec<libc::iovec>> {
    let slices = target.slices()?;
    let describe = |slice: &VolatileSlice| {
        // The guard ends here; the memory stays mapped because the ring owns the target.
        let (base, iov_len) = (slice.ptr_guard_mut().as_ptr(), slice.len());
        libc::iovec { iov_base: base.cast(), iov_len }
    };
    Ok(slices.iter().take(IOV_MAX).map(describe).collect())
}

/// Marks pages as dirty that the kernel wrote without the dirty bitmap.
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
            // SAFETY: the path outlives the completion, which this code waits for.
            unsafe { ring.ring.submission().push(&entry) }.unwrap();
            // Newer kernels return the error from the call itself.
            let _ = ring.ring.submit_and_wait(1);
            let answer = ring.ring.completion().next().unwrap();
            assert_eq!(answer.result(), -libc::EACCES);
        }
    }
}
