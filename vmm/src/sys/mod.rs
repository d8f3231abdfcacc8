//! System calls and unions without a safe wrapper: the place for `unsafe` outside `kvm/`.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::marker::PhantomData;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::thread::JoinHandleExt;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_bindings::kvm_run__bindgen_ty_1;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, RenameFlags, ResolveFlags, SeekFrom};
use rustix::io::{Errno, retry_on_intr};
use rustix::rand::GetRandomFlags;

/// Returns the reason that KVM gives with an internal error. Valid only after an exit with that
/// reason.
pub fn internal_suberror(exit: &kvm_run__bindgen_ty_1) -> u32 {
    // SAFETY: every variant of the union is plain data; the caller has checked the exit reason that
    // selects this one.
    unsafe { exit.internal.suberror }
}

/// Fills `bytes` with random bytes from the kernel.
pub fn fill_random(mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let count =
            retry_on_intr(|| rustix::rand::getrandom(&mut *bytes, GetRandomFlags::empty()))?;
        bytes = &mut bytes[count..];
    }
    Ok(())
}

/// Returns the name of the file's file system, if it keeps its data in memory.
pub fn memory_file_system(file: &File) -> io::Result<Option<&'static str>> {
    const RAMFS_MAGIC: libc::__fsword_t = 0x8584_58f6;
    Ok(match rustix::fs::fstatfs(file)?.f_type {
        libc::TMPFS_MAGIC => Some("tmpfs"),
        RAMFS_MAGIC => Some("ramfs"),
        _ => None,
    })
}

/// Returns the signal that takes a vCPU out of the guest. It is sent only to vCPU threads, which
/// keep it blocked.
pub fn kick_signal() -> i32 {
    libc::SIGRTMIN() + 1
}

/// Signals for what a thread itself has done. Blocked ones would end the process without a handler.
const OWN_FAULTS: [i32; 5] =
    [libc::SIGSYS, libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE];

/// Blocks every signal that comes from elsewhere in the calling thread, and in threads that it
/// starts, until this is dropped.
pub struct BlockedSignals {
    before: libc::sigset_t,
    /// Not `Send`: the mask belongs to one thread.
    _here: PhantomData<*const ()>,
}

impl BlockedSignals {
    pub fn new() -> io::Result<Self> {
        // SAFETY: plain data; `all` is filled before it is read, `before` by the call that
        // succeeds.
        let (result, before) = unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            for signal in OWN_FAULTS {
                libc::sigdelset(&mut all, signal);
            }
            (libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before), before)
        };
        match result {
            0 => Ok(Self { before, _here: PhantomData }),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: restores a mask that this thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

/// Consumes a pending kick, so that it does not end the next run.
pub fn take_kick() {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `set` is initialized before use; a null info pointer is allowed; no pending kick is
    // fine.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, kick_signal());
        libc::sigtimedwait(&set, std::ptr::null_mut(), &now);
    }
}

/// Kicks a thread. A thread that has ended, but was not joined, is left alone.
pub fn kick<T>(thread: &JoinHandle<T>) {
    if !thread.is_finished() {
        // SAFETY: the thread was not joined, for the handle still exists, so its id is valid.
        unsafe { libc::pthread_kill(thread.as_pthread_t(), kick_signal()) };
    }
}

/// Returns the processor time that a thread has used.
pub fn cpu_time<T>(thread: &JoinHandle<T>) -> Duration {
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the thread was not joined, for the handle still exists; both variables outlive the
    // calls.
    let told = unsafe {
        libc::pthread_getcpuclockid(thread.as_pthread_t(), &mut clock) == 0
            && libc::clock_gettime(clock, &mut time) == 0
    };
    if told { Duration::new(time.tv_sec as u64, time.tv_nsec as u32) } else { Duration::ZERO }
}

/// Borrows the descriptor of a type that only implements `AsRawFd`.
pub fn borrowed<T: AsRawFd>(of: &T) -> BorrowedFd<'_> {
    // SAFETY: `of` owns the descriptor and is borrowed for as long as the result.
    unsafe { BorrowedFd::borrow_raw(of.as_raw_fd()) }
}

/// Waits until `fd` is readable; returns false when `timeout` passes first.
pub fn wait_readable(fd: &impl AsRawFd, timeout: Option<Duration>) -> io::Result<bool> {
    let mut one = [libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    poll(&mut one, timeout)?;
    Ok(one[0].revents != 0)
}

/// Waits until one of two descriptors is readable or has ended, and returns which. Both are false
/// when `timeout` has passed.
pub fn wait_either(
    one: &impl AsRawFd,
    two: &impl AsRawFd,
    timeout: Option<Duration>,
) -> io::Result<(bool, bool)> {
    let watch = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut polls = [watch(one.as_raw_fd()), watch(two.as_raw_fd())];
    poll(&mut polls, timeout)?;
    Ok((polls[0].revents != 0, polls[1].revents != 0))
}

/// Waits for an event of one of `polls`, or until `timeout` has passed, also over signals.
fn poll(polls: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        // Rounded up: a poll that is too short would spin.
        let millis = left.map_or(-1, |left| left.as_micros().div_ceil(1000).min(1 << 30) as i32);
        // SAFETY: a live array of exactly that many entries.
        match unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, millis) } {
            0 if left.is_some_and(|left| !left.is_zero()) => {}
            0.. => return Ok(()),
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
}

/// Makes closing the socket send a reset, so that the peer does not take a failure for a regular
/// end.
pub fn reset_on_close(socket: &TcpStream) {
    // If it fails, the peer sees a regular end.
    let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
}

/// Opens a folder, to open files beneath it.
pub fn open_dir(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_CLOEXEC).open(path)
}

/// For reading: never through a link, and without waiting for a FIFO's writer.
fn plain_read() -> OFlags {
    OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC
}

/// Opens a file of a folder for reading: never through a link, and without waiting for a FIFO's
/// writer.
pub fn open_beneath(dir: &File, name: &str) -> io::Result<File> {
    Ok(rustix::fs::openat(dir, name, plain_read(), Mode::empty())?.into())
}

/// Opens a file or folder for reading if its path contains no link, without waiting for a FIFO's
/// writer.
pub fn open_without_links(path: &Path, flags: OFlags) -> io::Result<File> {
    let (flags, beneath) = (plain_read() | flags, ResolveFlags::NO_SYMLINKS);
    Ok(rustix::fs::openat2(CWD, path, flags, Mode::empty(), beneath)?.into())
}

/// Takes a lock that lasts as long as the file is open, or fails at once.
pub fn lock_file(file: &File) -> io::Result<()> {
    Ok(rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

pub fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    Ok(rustix::fs::fchmod(file, Mode::from_raw_mode(mode))?)
}

/// Renames a file or folder, and fails if the new name exists.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

/// Exchanges two names atomically.
pub fn rename_exchange(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::EXCHANGE)?)
}

/// Returns where the next data of a file begins; `None` if only a hole is left.
pub fn next_data(file: &File, from: u64) -> io::Result<Option<u64>> {
    seek(file, SeekFrom::Data(from))
}

/// Returns where the next hole of a file begins; the end of the file counts as a hole.
pub fn next_hole(file: &File, from: u64) -> io::Result<Option<u64>> {
    seek(file, SeekFrom::Hole(from))
}

fn seek(file: &File, to: SeekFrom) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, to) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
