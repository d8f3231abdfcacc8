//! A child process that copies guest memory into a file while the guest runs.
//!
//! The child shares every page with the monitor until one of them writes it. So the guest is paused
//! only while page tables are copied, and the child writes memory as it was at that instant.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use pvmm_devices::GuestMemory;

use super::{PAGE, PageRanges, pages, sys};
use crate::thread_filters::SystemCallFilter;

/// The time limit of a copy: a disk writes 64 GiB in that time.
const COPY_TIME: Duration = Duration::from_secs(600);

/// A copy that is being made. Dropping it kills the child.
pub struct BackgroundCopy {
    pid: libc::pid_t,
    process: OwnedFd,
    waited: bool,
}

/// One range of memory to copy.
struct Part {
    address: *const u8,
    pages: u64,
    offset: u64,
}

impl BackgroundCopy {
    /// Begins to copy `runs` of guest memory as it is now to the same places of `file`. The guest
    /// must be paused during this call, and only during it. The child copies under `filter`.
    pub fn start(
        guest: &GuestMemory,
        runs: &PageRanges,
        file: &File,
        filter: Option<&SystemCallFilter>,
    ) -> io::Result<Self> {
        // The child must not allocate: another thread may hold the allocator's lock.
        let mut parts = Vec::new();
        for run in runs.iter() {
            for (address, part) in pages::host_parts(guest, run) {
                let pages = (part.end - part.start) / PAGE;
                parts.push(Part { address, pages, offset: part.start });
            }
        }
        let whole = PageRanges::all(runs.iter().last().map_or(0, |run| run.end));
        let each = |advice| whole.iter().try_for_each(|run| pages::advise(guest, run, advice));
        each(libc::MADV_DOFORK)?;
        let forked = fork();
        if let Ok(Forked::Child) = forked {
            leave_the_rest(file.as_raw_fd());
            let confined = filter.map_or(Ok(()), SystemCallFilter::install);
            let copied = confined.map_err(drop).and_then(|()| copy(&parts, file.as_raw_fd()));
            // SAFETY: ends the child at once, without running anything that this process has set
            // up.
            unsafe { libc::_exit(i32::from(copied.is_err())) };
        }
        each(libc::MADV_DONTFORK)?;
        match forked? {
            Forked::Parent(pid, process) => Ok(Self { pid, process, waited: false }),
            Forked::Child => unreachable!("the child has ended"),
        }
    }

    /// Waits until everything is copied.
    pub fn finish(mut self) -> io::Result<()> {
        if !crate::sys::wait_readable(&self.process, Some(COPY_TIME))? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match self.wait()? {
            0 => Ok(()),
            _ => Err(io::Error::other("the copying process failed; is there memory enough?")),
        }
    }

    fn wait(&mut self) -> io::Result<i32> {
        self.waited = true;
        let mut status = 0;
        loop {
            // SAFETY: `status` outlives the call; the process is our own child, waited for once.
            let waited = unsafe { libc::waitpid(self.pid, &mut status, libc::__WALL) };
            match waited {
                0.. => return Ok(status),
                _ => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
            }
        }
    }
}

impl Drop for BackgroundCopy {
    fn drop(&mut self) {
        if !self.waited {
            // SAFETY: the process was not waited for, so its id is still its own.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            let _ = self.wait();
        }
    }
}

enum Forked {
    Parent(libc::pid_t, OwnedFd),
    Child,
}

/// Forks this process, with this thread only. The end of the child sends no signal, so that callers
/// who wait for children of their own do not see it.
fn fork() -> io::Result<Forked> {
    let mut process: i32 = -1;
    // The kernel wants it as 64 bits; the end of the child sends signal zero, which is none.
    let flags = libc::CLONE_PIDFD as libc::c_ulong;
    // SAFETY: as fork(2): the child gets a copy of this thread's stack and goes on here; `process`
    // outlives the call.
    let pid =
        unsafe { libc::syscall(libc::SYS_clone, flags, 0usize, &raw mut process, 0usize, 0usize) };
    match pid {
        0 => Ok(Forked::Child),
        // SAFETY: a fresh descriptor that nobody else has.
        1.. => Ok(Forked::Parent(pid as libc::pid_t, unsafe { OwnedFd::from_raw_fd(process) })),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Closes everything but `file`, in the child: system calls only.
fn leave_the_rest(file: i32) {
    // SAFETY: descriptors of the child alone; it must not keep a guest's KVM, sockets or locks
    // alive. Dying with the parent's thread is only asked for.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let close = |from: u32, to: u32| libc::syscall(libc::SYS_close_range, from, to, 0);
        if file > 0 {
            close(0, file as u32 - 1);
        }
        close(file as u32 + 1, u32::MAX);
        // Where memory runs out, the copy goes before the guest does.
        let adjust = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
        if adjust >= 0 {
            libc::write(adjust, c"1000".as_ptr().cast(), 4);
            libc::close(adjust);
        }
    }
}

/// Copies the parts, in the child: system calls and reads, no allocation, no lock, no panic.
fn copy(parts: &[Part], file: i32) -> Result<(), ()> {
    for part in parts {
        let at = |page: u64| part.address.wrapping_add((page * PAGE) as usize);
        let mut begin = 0;
        for page in 0..=part.pages {
            // SAFETY: pages below `pages` are the child's view of guest memory, and aligned.
            if page < part.pages && !unsafe { sys::is_zero_page(at(page)) } {
                continue;
            }
            let (mut from, end) = (at(begin), at(page));
            let mut offset = part.offset + begin * PAGE;
            while from < end {
                let len = end as usize - from as usize;
                // SAFETY: the kernel only reads, from pages that nobody in this process changes or
                // unmaps.
                let wrote = unsafe { libc::pwrite(file, from.cast(), len, offset as libc::off_t) };
                if wrote <= 0 {
                    return Err(());
                }
                from = from.wrapping_add(wrote as usize);
                offset += wrote as u64;
            }
            begin = page + 1;
        }
    }
    Ok(())
}
