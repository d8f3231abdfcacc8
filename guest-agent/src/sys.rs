//! Thin safe wrappers of the system calls that the agent's event loop uses.
//!
//! The standard library has no epoll, signalfd, wait4 or vsock; their `unsafe` is confined to this
//! module.
#![allow(unsafe_code)] // system calls on plain data, each with its own note

pub mod inotify;
pub mod session;
pub mod system;
pub mod tcp;
pub mod vsock;

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// Converts a result of -1 to the errno of the system call.
pub fn check(result: libc::c_int) -> Result<libc::c_int> {
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result) }
}

fn check_len(result: isize) -> Result<usize> {
    usize::try_from(result).map_err(|_| Error::last_os_error())
}

fn own(result: libc::c_int) -> Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel has just made this descriptor for the agent; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// An epoll instance.
pub struct Epoll(OwnedFd);

/// The readiness of one descriptor.
#[derive(Debug, Clone, Copy)]
pub struct Ready {
    pub token: u64,
    pub readable: bool,
    pub writable: bool,
    /// The other end is closed; remaining data can still be read.
    pub hung_up: bool,
}

impl Epoll {
    pub fn new() -> Result<Self> {
        // SAFETY: takes no pointer.
        own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map(Self)
    }

    /// Watches a descriptor for edges of readiness, in both directions, until it is closed.
    pub fn watch_edges(&self, fd: &OwnedFd, token: u64) -> Result<()> {
        let interest = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        self.add(fd.as_raw_fd(), interest, token)
    }

    /// Watches a descriptor for as long as it is readable.
    pub fn watch_level(&self, fd: &OwnedFd, token: u64) -> Result<()> {
        self.add(fd.as_raw_fd(), libc::EPOLLIN, token)
    }

    fn add(&self, fd: RawFd, interest: libc::c_int, token: u64) -> Result<()> {
        match self.control(libc::EPOLL_CTL_ADD, fd, interest, token) {
            // The entry of a closed copy of a descriptor stays while another copy lives, and this
            // descriptor got its number.
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {
                self.control(libc::EPOLL_CTL_MOD, fd, interest, token)
            }
            other => other,
        }
    }

    fn control(&self, how: i32, fd: RawFd, interest: libc::c_int, token: u64) -> Result<()> {
        let mut event = libc::epoll_event { events: interest as u32, u64: token };
        // SAFETY: `event` outlives the call.
        let result = unsafe { libc::epoll_ctl(self.0.as_raw_fd(), how, fd, &mut event) };
        check(result).map(drop)
    }

    /// Waits for events; without a timeout, forever.
    pub fn wait(&self, timeout: Option<Duration>, ready: &mut Vec<Ready>) -> Result<()> {
        const BATCH: usize = 64;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        // Rounded up, so that a deadline has passed when its timeout has.
        let millis = timeout.map_or(-1, |left| {
            left.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as libc::c_int
        });
        // SAFETY: `events` has room for BATCH events.
        let result = unsafe {
            libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), BATCH as i32, millis)
        };
        let count = match check(result) {
            Ok(count) => count as usize,
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => 0,
            Err(e) => return Err(e),
        };
        ready.clear();
        ready.extend(events[..count].iter().map(|event| {
            let bits = event.events as libc::c_int;
            let closed = libc::EPOLLHUP | libc::EPOLLERR;
            Ready {
                token: event.u64,
                readable: bits & (libc::EPOLLIN | libc::EPOLLRDHUP | closed) != 0,
                writable: bits & (libc::EPOLLOUT | closed) != 0,
                hung_up: bits & (libc::EPOLLRDHUP | closed) != 0,
            }
        }));
        Ok(())
    }
}

/// Makes a pipe, closed on exec, and returns its read end and write end.
pub fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    // SAFETY: `ends` has room for the two descriptors.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    // SAFETY: pipe2 has made both for the agent.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

/// Sets the number of bytes at which a socket becomes readable; some kinds of socket ignore it.
pub fn set_low_water(socket: &OwnedFd, bytes: u32) {
    let (value, len) = (bytes as libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
    let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
    // SAFETY: the kernel reads one int.
    let _ = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len)
    };
}

/// Enlarges a pipe's buffer, if the kernel allows this user that size.
pub fn widen_pipe(fd: &OwnedFd, bytes: u32) {
    // SAFETY: fcntl with F_SETPIPE_SZ takes no pointer.
    let _ = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETPIPE_SZ, bytes as libc::c_int) };
}

/// Moves up to `most` bytes between a file and a pipe within the kernel; fails with EINVAL where
/// that is not possible.
pub fn splice(from: &File, to: &File, most: usize) -> Result<usize> {
    loop {
        let (null, from, to) = (std::ptr::null_mut(), from.as_raw_fd(), to.as_raw_fd());
        // SAFETY: the offsets are null, so no pointer is followed.
        let moved = check_len(unsafe { libc::splice(from, null, to, null, most, 0) });
        match moved {
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
            other => return other,
        }
    }
}

/// Makes reads and writes return at once. The flag affects only this end of a pipe.
pub fn set_nonblocking(fd: &OwnedFd) -> Result<()> {
    // SAFETY: fcntl with F_GETFL and F_SETFL takes no pointer.
    unsafe {
        let flags = check(libc::fcntl(fd.as_raw_fd(), libc::F_GETFL))?;
        check(libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK)).map(drop)
    }
}

/// Appends up to `most` bytes from `fd` to `buffer`.
pub fn read_onto(fd: &OwnedFd, buffer: &mut Vec<u8>, most: usize) -> Result<usize> {
    buffer.reserve(most);
    let old = buffer.len();
    loop {
        let spare = &mut buffer.spare_capacity_mut()[..most];
        // SAFETY: `spare` is writable memory of `most` bytes.
        let read =
            check_len(unsafe { libc::read(fd.as_raw_fd(), spare.as_mut_ptr().cast(), most) });
        match read {
            Ok(count) => {
                // SAFETY: the kernel has filled `count` bytes after the old length.
                unsafe { buffer.set_len(old + count) };
                return Ok(count);
            }
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Writes once. The process blocks SIGPIPE, so a closed pipe is only an error.
pub fn write_once(fd: &OwnedFd, bytes: &[u8]) -> Result<usize> {
    loop {
        // SAFETY: `bytes` is readable for its length.
        let wrote =
            check_len(unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) });
        match wrote {
            Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
            other => return other,
        }
    }
}

/// Returns the number of bytes that wait in a pipe.
pub fn waiting_bytes(fd: &OwnedFd) -> u64 {
    let mut count: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &mut count) };
    if result < 0 { 0 } else { count.max(0) as u64 }
}

/// Makes an eventfd that wakes the event loop.
pub fn event_counter() -> Result<OwnedFd> {
    // SAFETY: takes no pointer.
    own(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Blocks these signals and returns a descriptor to read them from; also blocks SIGPIPE.
pub fn signal_reader(signals: &[libc::c_int]) -> Result<OwnedFd> {
    // SAFETY: a sigset is plain data that sigemptyset initialises before any other use; the
    // pointers live through the calls.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in signals {
            libc::sigaddset(&mut set, *signal);
        }
        let read = own(libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK))?;
        libc::sigaddset(&mut set, libc::SIGPIPE);
        match libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut()) {
            0 => Ok(read),
            errno => Err(Error::from_raw_os_error(errno)),
        }
    }
}

/// Sets every signal to its default action, so that started processes inherit no other.
pub fn default_signals() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: SIG_DFL installs no code. KILL, STOP and the two that the C library keeps for
        // itself are refused, which is fine.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// Returns the next signal, if one is pending.
pub fn next_signal(reader: &OwnedFd) -> Option<libc::c_int> {
    let mut info = Vec::new();
    let len = size_of::<libc::signalfd_siginfo>();
    match read_onto(reader, &mut info, len) {
        Ok(count) if count == len => {
            let number: [u8; 4] = *info.first_chunk()?;
            Some(u32::from_ne_bytes(number) as libc::c_int)
        }
        _ => None,
    }
}

/// A child process that has died.
pub struct Reaped {
    pub pid: libc::pid_t,
    pub status: libc::c_int,
    pub usage: libc::rusage,
}

/// Reaps one dead child, if there is one.
pub fn reap() -> Option<Reaped> {
    let mut status = 0;
    // SAFETY: rusage is plain data for which zeroes are a valid value.
    let mut usage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers live through the call.
    let pid = unsafe { libc::wait4(-1, &mut status, libc::WNOHANG, &mut usage) };
    (pid > 0).then_some(Reaped { pid, status, usage })
}

/// Sends a signal to a process, or with a negative number to a group.
pub fn kill(pid: libc::pid_t, signal: libc::c_int) -> Result<()> {
    // SAFETY: takes no pointer.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// Returns the agent's effective user id.
pub fn user_id() -> u32 {
    // SAFETY: takes no pointer and cannot fail.
    unsafe { libc::geteuid() }
}

/// Adopts orphans of started processes, so that they are reaped even when the agent is not PID 1.
pub fn become_subreaper() -> Result<()> {
    // SAFETY: takes no pointer.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }).map(drop)
}

/// Uses one heap for all threads: a heap for each short-lived file worker would dirty pages.
pub fn share_one_heap() {
    // SAFETY: sets a parameter of the allocator.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Raises the limit of open files and returns the old one.
pub fn raise_open_files(target: u64) -> libc::rlimit {
    let mut old = libc::rlimit { rlim_cur: 1024, rlim_max: 4096 };
    // SAFETY: the pointers live through the calls.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut old);
        let wish = libc::rlimit { rlim_cur: target, rlim_max: old.rlim_max.max(target) };
        if libc::setrlimit(libc::RLIMIT_NOFILE, &wish) < 0 {
            let all = libc::rlimit { rlim_cur: old.rlim_max, rlim_max: old.rlim_max };
            libc::setrlimit(libc::RLIMIT_NOFILE, &all);
        }
    }
    old
}

/// Opens a path with the given flags and O_CLOEXEC.
pub fn open(path: &CStr, flags: libc::c_int, mode: libc::mode_t) -> Result<OwnedFd> {
    // SAFETY: `path` is a C string that outlives the call.
    own(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, mode) })
}

/// Renames; with `no_replace`, fails if the target exists.
pub fn rename(from: &Path, to: &Path, no_replace: bool) -> Result<()> {
    let from = CString::new(from.as_os_str().as_bytes())?;
    let to = CString::new(to.as_os_str().as_bytes())?;
    let flags = if no_replace { libc::RENAME_NOREPLACE } else { 0 };
    // SAFETY: two C strings that outlive the call.
    check(unsafe {
        libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags)
    })
    .map(drop)
}

/// The default priority, with which commands run.
pub const ORDINARY_PRIORITY: libc::c_int = 0;
const AGENT_PRIORITY: libc::c_int = -15;

/// Gives the agent priority over the commands it runs. Without the permission, nothing changes.
pub fn put_before_commands() {
    // SAFETY: plain numbers; zero means this process.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, AGENT_PRIORITY) };
}

/// Returns where the next data of a file begins; `None` if only a hole is left.
pub fn next_data(file: &std::fs::File, from: u64) -> Result<Option<u64>> {
    seek_for(file, from, libc::SEEK_DATA)
}

/// Returns where the next hole of a file begins; the end of the file counts as a hole.
pub fn next_hole(file: &std::fs::File, from: u64) -> Result<Option<u64>> {
    seek_for(file, from, libc::SEEK_HOLE)
}

fn seek_for(file: &std::fs::File, from: u64, whence: libc::c_int) -> Result<Option<u64>> {
    let from = libc::off_t::try_from(from).unwrap_or(libc::off_t::MAX);
    // SAFETY: takes no pointer.
    let found = unsafe { libc::lseek(std::os::fd::AsRawFd::as_raw_fd(file), from, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            e => Err(e),
        },
    }
}

/// Seeks behind the last record of a log.
pub fn seek_end(fd: RawFd) {
    // SAFETY: takes no pointer. If it fails, old records are read, which is harmless.
    unsafe { libc::lseek(fd, 0, libc::SEEK_END) };
}

/// Accepts a connection of a Unix socket.
pub fn unix_accept(listener: &OwnedFd) -> Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: null means that the peer's address is not wanted.
    own(unsafe {
        libc::accept4(listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags)
    })
}
