//! The system calls that a bench needs and the standard library has no name for.
#![allow(unsafe_code)] // Each is one call with plain arguments.

use std::ffi::CString;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Nanoseconds of a clock that all processes share.
pub fn monotonic_ns() -> u64 {
    // SAFETY: the timespec is ours and is filled in.
    let now = unsafe {
        let mut now: libc::timespec = mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now);
        now
    };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Faults without and with a disk read, and processor time in and outside the kernel, of this
/// process.
pub fn usage() -> (i64, i64, Duration, Duration) {
    // SAFETY: the structure is ours and is filled in.
    let usage = unsafe {
        let mut usage: libc::rusage = mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let time =
        |t: libc::timeval| Duration::from_micros(t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64);
    (usage.ru_minflt, usage.ru_majflt, time(usage.ru_stime), time(usage.ru_utime))
}

/// A network and a mount table of this process's own, gone with it. Called before any thread
/// exists.
pub fn unshare() -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) })?;
    let (none, root) = (c"none", c"/");
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: strings that outlive the call, and no data.
    check(unsafe {
        libc::mount(none.as_ptr(), root.as_ptr(), std::ptr::null(), flags, std::ptr::null())
    })
}

/// Whatever this process starts from now on lies at the same addresses each time.
pub fn fix_addresses() -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) })
}

/// Standard input without the standard library's buffer for it.
pub fn stdin() -> BorrowedFd<'static> {
    // SAFETY: nobody in this program closes it.
    unsafe { BorrowedFd::borrow_raw(libc::STDIN_FILENO) }
}

/// Memory as a file system, at `path`.
pub fn mount_tmpfs(path: &Path) -> io::Result<()> {
    let target = CString::new(path.as_os_str().as_bytes())?;
    let kind = c"tmpfs";
    // SAFETY: strings that outlive the call, and no data.
    check(unsafe {
        libc::mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, std::ptr::null())
    })
}

/// Listens for guests on `port` of the host's own vsock address.
pub fn vsock_listen(port: u32) -> io::Result<OwnedFd> {
    let socket = vsock()?;
    let address = address(libc::VMADDR_CID_ANY, port);
    let size = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: the address is a sockaddr_vm of the size passed.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) })?;
    // SAFETY: no memory is passed.
    check(unsafe { libc::listen(socket.as_raw_fd(), 8) })?;
    Ok(socket)
}

/// Takes the next connection of a listener.
pub fn accept(listener: BorrowedFd<'_>, deadline: Instant) -> io::Result<OwnedFd> {
    let left = deadline.saturating_duration_since(Instant::now()).as_millis().min(1 << 30);
    let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd that outlives the call.
    if unsafe { libc::poll(&mut poll, 1, left as libc::c_int) } <= 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    // SAFETY: no address is asked for; the descriptor is new and ours.
    unsafe {
        let none = std::ptr::null_mut();
        let fd = libc::accept4(listener.as_raw_fd(), none, none.cast(), libc::SOCK_CLOEXEC);
        check(fd)?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Connects to `port` of a guest behind the host kernel's own vsock.
pub fn vsock_connect(cid: u32, port: u32) -> io::Result<OwnedFd> {
    let socket = vsock()?;
    let address = address(cid, port);
    let size = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: the address is a sockaddr_vm of the size passed.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size) })?;
    Ok(socket)
}

fn vsock() -> io::Result<OwnedFd> {
    // SAFETY: the descriptor is new and ours.
    unsafe {
        let fd = libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        check(fd)?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: sockaddr_vm is plain data for which zeroes are a value.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    (address.svm_cid, address.svm_port) = (cid, port);
    address
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// One heap for all threads, as the launcher has.
pub fn keep_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a number for the allocator; nothing else runs yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Whether there is something to read, or its end, within `time`.
pub fn is_readable_within(fd: &impl AsRawFd, time: Duration) -> io::Result<bool> {
    let mut wish = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which lives through the call.
    check(unsafe { libc::poll(&raw mut wish, 1, time.as_millis() as libc::c_int) })?;
    Ok(wish.revents != 0)
}
