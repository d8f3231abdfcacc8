//! System calls that the benchmark needs and for which the standard library has no function.
#![allow(unsafe_code)] // Each function is one call with plain arguments.

use std::ffi::CString;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Returns the time in nanoseconds of the monotonic clock, which all processes share.
pub fn monotonic_ns() -> u64 {
    // SAFETY: the call fills in a timespec of this function.
    let now = unsafe {
        let mut now: libc::timespec = mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now);
        now
    };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Returns the page faults of this process without and with a disk read, and its processor time in
/// the kernel and outside it.
pub fn usage() -> (i64, i64, Duration, Duration) {
    // SAFETY: the call fills in a structure of this function.
    let usage = unsafe {
        let mut usage: libc::rusage = mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let time =
        |t: libc::timeval| Duration::from_micros(t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64);
    (usage.ru_minflt, usage.ru_majflt, time(usage.ru_stime), time(usage.ru_utime))
}

/// Moves this process to a new network namespace and a new mount namespace, which end with it. No
/// other thread may exist.
pub fn unshare() -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) })?;
    let (none, root) = (c"none", c"/");
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: the strings outlive the call, and no data is passed.
    check(unsafe {
        libc::mount(none.as_ptr(), root.as_ptr(), std::ptr::null(), flags, std::ptr::null())
    })
}

/// Turns off the randomisation of addresses for programs that this process executes from now on.
pub fn fix_addresses() -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) })
}

/// Returns standard input without the buffer of the standard library.
pub fn stdin() -> BorrowedFd<'static> {
    // SAFETY: nothing in this program closes standard input.
    unsafe { BorrowedFd::borrow_raw(libc::STDIN_FILENO) }
}

/// Mounts a tmpfs at `path`.
pub fn mount_tmpfs(path: &Path) -> io::Result<()> {
    let target = CString::new(path.as_os_str().as_bytes())?;
    let kind = c"tmpfs";
    // SAFETY: the strings outlive the call, and no data is passed.
    check(unsafe {
        libc::mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, std::ptr::null())
    })
}

/// Listens for guests on `port` of the host kernel's vsock.
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

/// Accepts the next connection of a listener. Fails with `TimedOut` at the deadline.
pub fn accept(listener: BorrowedFd<'_>, deadline: Instant) -> io::Result<OwnedFd> {
    let left = deadline.saturating_duration_since(Instant::now()).as_millis().min(1 << 30);
    let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, which outlives the call.
    if unsafe { libc::poll(&mut poll, 1, left as libc::c_int) } <= 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    // SAFETY: no address is requested; the descriptor is new and belongs to this function.
    unsafe {
        let none = std::ptr::null_mut();
        let fd = libc::accept4(listener.as_raw_fd(), none, none.cast(), libc::SOCK_CLOEXEC);
        check(fd)?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Connects to `port` of a guest through the host kernel's vsock.
pub fn vsock_connect(cid: u32, port: u32) -> io::Result<OwnedFd> {
    let socket = vsock()?;
    let address = address(cid, port);
    let size = size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: the address is a sockaddr_vm of the size passed.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size) })?;
    Ok(socket)
}

fn vsock() -> io::Result<OwnedFd> {
    // SAFETY: the descriptor is new and belongs to this function.
    unsafe {
        let fd = libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        check(fd)?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn address(cid: u32, port: u32) -> libc::sockaddr_vm {
    // SAFETY: sockaddr_vm is plain data for which zeros are a valid value.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    (address.svm_cid, address.svm_port) = (cid, port);
    address
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Limits the allocator to one heap for all threads, as in the launcher.
pub fn keep_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call passes a number to the allocator; no other thread exists yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Waits up to `time` until `fd` has bytes to read or its end. Returns whether it has.
pub fn is_readable_within(fd: &impl AsRawFd, time: Duration) -> io::Result<bool> {
    let mut wish = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, which outlives the call.
    check(unsafe { libc::poll(&raw mut wish, 1, time.as_millis() as libc::c_int) })?;
    Ok(wish.revents != 0)
}
