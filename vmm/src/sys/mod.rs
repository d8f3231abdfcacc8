//! System calls and unions without a safe wrapper: the place for `unsafe` outside `kvm/`.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::thread::JoinHandleExt;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_bindings::kvm_run__bindgen_ty_1;

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
        // SAFETY: `bytes` is writable for its length.
        let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        match usize::try_from(count) {
            Ok(count) => bytes = &mut bytes[count..],
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
    }
    Ok(())
}

/// Returns the name of the file's file system, if it keeps its data in memory.
pub fn memory_file_system(file: &File) -> io::Result<Option<&'static str>> {
    const RAMFS_MAGIC: libc::__fsword_t = 0x8584_58f6;
    let mut facts = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the kernel fills the structure, which lives across the call; it is read only if that
    // succeeded.
    let kind = unsafe {
        if libc::fstatfs(file.as_raw_fd(), facts.as_mut_ptr()) < 0 {
            return Err(io::Error::last_os_error());
        }
        facts.assume_init().f_type
    };
    Ok(match kind {
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
pub fn wait_readable(
    fd: &impl std::os::fd::AsRawFd,
    timeout: Option<Duration>,
) -> io::Result<bool> {
    let deadline = timeout.map(|timeout| std::time::Instant::now() + timeout);
    loop {
        let left = deadline.map(|d| d.saturating_duration_since(std::time::Instant::now()));
        // Rounded up: a poll that is too short would spin.
        let millis = left.map_or(-1, |left| left.as_millis().saturating_add(1).min(1 << 30) as i32);
        let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, which lives across the call.
        match unsafe { libc::poll(&mut poll, 1, millis) } {
            0 if left.is_none_or(|left| left.is_zero()) => return Ok(false),
            0 => {}
            1.. => return Ok(true),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
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
    // Rounded up: a poll that is too short would spin.
    let millis = timeout.map_or(-1, |t| t.as_millis().saturating_add(1).min(1 << 30) as i32);
    // SAFETY: two pollfds, which live across the call.
    match unsafe { libc::poll(polls.as_mut_ptr(), 2, millis) } {
        0.. => Ok((polls[0].revents != 0, polls[1].revents != 0)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Opens a folder, to open files beneath it.
pub fn open_dir(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_CLOEXEC).open(path)
}

/// Opens a file of a folder for reading: never through a link, and without waiting for a FIFO's
/// writer.
pub fn open_beneath(dir: &File, name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    // SAFETY: the name ends in NUL and outlives the call; the descriptor is borrowed.
    let fd = unsafe { libc::openat(dir.as_raw_fd(), name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else has.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Opens a file or folder for reading if its path contains no link, without waiting for a FIFO's
/// writer.
pub fn open_without_links(path: &Path, flags: i32) -> io::Result<File> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let flags = flags | libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    // SAFETY: all zeros is a valid value of this plain structure.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = flags as u64;
    how.resolve = libc::RESOLVE_NO_SYMLINKS;
    // SAFETY: the path ends in NUL, and both it and the structure, whose size is passed, outlive
    // the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_openat2,
            libc::AT_FDCWD,
            path.as_ptr(),
            &raw const how,
            size_of::<libc::open_how>(),
        )
    };
    match i32::try_from(fd) {
        // SAFETY: a new descriptor that nobody else has.
        Ok(fd) if fd >= 0 => Ok(unsafe { File::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes a lock that lasts as long as the file is open, or fails at once.
pub fn lock_file(file: &File) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) })
}

pub fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::fchmod(file.as_raw_fd(), mode) })
}

/// Renames a file or folder, and fails if the new name exists.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    rename(from, to, libc::RENAME_NOREPLACE)
}

/// Exchanges two names atomically.
pub fn rename_exchange(from: &Path, to: &Path) -> io::Result<()> {
    rename(from, to, libc::RENAME_EXCHANGE)
}

fn rename(from: &Path, to: &Path, flags: u32) -> io::Result<()> {
    let from = CString::new(from.as_os_str().as_bytes())?;
    let to = CString::new(to.as_os_str().as_bytes())?;
    let here = libc::AT_FDCWD;
    // SAFETY: both names end in NUL and outlive the call.
    check(unsafe { libc::renameat2(here, from.as_ptr(), here, to.as_ptr(), flags) })
}

fn check(result: i32) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns where the next data of a file begins; `None` if only a hole is left.
pub fn next_data(file: &std::fs::File, from: u64) -> io::Result<Option<u64>> {
    seek_for(file, from, libc::SEEK_DATA)
}

/// Returns where the next hole of a file begins; the end of the file counts as a hole.
pub fn next_hole(file: &std::fs::File, from: u64) -> io::Result<Option<u64>> {
    seek_for(file, from, libc::SEEK_HOLE)
}

fn seek_for(file: &std::fs::File, from: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    let from = libc::off_t::try_from(from).unwrap_or(libc::off_t::MAX);
    // SAFETY: takes no pointer.
    let found = unsafe { libc::lseek(std::os::fd::AsRawFd::as_raw_fd(file), from, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            e => Err(e),
        },
    }
}
