//! System calls and unions that have no safe wrapper: the home of `unsafe` outside `kvm/`.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::thread::JoinHandleExt;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kvm_bindings::kvm_run__bindgen_ty_1;
use pvmm_devices::STACK_BYTES;

/// The reason that KVM gives with an internal error.
pub fn internal_suberror(exit: &kvm_run__bindgen_ty_1) -> u32 {
    // SAFETY: every variant of the union is plain data; the caller saw the exit reason that names this one.
    unsafe { exit.internal.suberror }
}

/// Fills `bytes` with random ones from the kernel.
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

/// Gives the kernel back what the allocator keeps for later.
pub fn trim_heap() {
    // The allocator keeps up to seven freed pieces of each small size for a thread, and takes them back when the thread
    // ends: a third of a quiet process's heap. So this thread takes its own, and one that ends frees them.
    let sizes = (24..=1032).step_by(16);
    let kept: Vec<Vec<u8>> =
        sizes.flat_map(|size| (0..7).map(move |_| Vec::with_capacity(size))).collect();
    let thread = thread::Builder::new().name("pvmm-free".into());
    if let Ok(freeing) = thread.stack_size(STACK_BYTES).spawn(|| drop(kept)) {
        let _ = freeing.join();
    }
    #[cfg(target_env = "gnu")]
    // SAFETY: the allocator locks what it looks at, and touches nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Gives the kernel back the pages of this thread's stack that only deeper calls have used.
// In a caller's frame, variables of the caller's could lie below those of this function.
#[inline(never)]
pub fn trim_stack() {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let here = attributes.as_ptr() as usize;
    let (mut lowest, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: the first call fills the attributes if it succeeds, and then they are read and let go of once.
    let told = unsafe {
        libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) == 0
            && libc::pthread_attr_getstack(attributes.as_ptr(), &mut lowest, &mut size) == 0
            && libc::pthread_attr_destroy(attributes.as_mut_ptr()) == 0
    };
    let (start, end) = (lowest as usize, here.saturating_sub(STACK_IN_USE) & !(PAGE - 1));
    if told && start < end && here - start < size {
        // SAFETY: the stack grows down, and this call and what it calls need less than is left below `here`: nobody will
        // read these pages before they are written. Those that were never used are not there, which is told and harmless.
        unsafe { libc::madvise(lowest, end - start, libc::MADV_DONTNEED) };
    }
}

/// Bytes below its own variables that `trim_stack` and the call of its last line may use.
const STACK_IN_USE: usize = 1 << 10;
const PAGE: usize = 4096;

/// The name of the file system that a file is on, if what it holds is in memory.
pub fn memory_file_system(file: &File) -> io::Result<Option<&'static str>> {
    const RAMFS_MAGIC: libc::__fsword_t = 0x8584_58f6;
    let mut facts = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the kernel fills the facts, which live across the call; they are read only if it has.
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

/// The processor time that this process has used.
pub fn process_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, which lives across the call.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// The signal that gets a vCPU out of the guest. Sent to vCPU threads only, which keep it blocked.
pub fn kick_signal() -> i32 {
    libc::SIGRTMIN() + 1
}

/// Every signal is blocked in the thread that made this, and in those that it starts, until this is dropped.
pub struct BlockedSignals {
    before: libc::sigset_t,
    /// The mask is one thread's own.
    _here: PhantomData<*const ()>,
}

impl BlockedSignals {
    pub fn new() -> io::Result<Self> {
        // SAFETY: plain data; `all` is filled before it is read, `before` by the call that succeeds.
        let (result, before) = unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
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
        // SAFETY: a mask that this thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

/// Takes a pending kick, so that the next run is not ended by it.
pub fn take_kick() {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `set` is initialized before use; a null info pointer is allowed; no kick pending is fine.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, kick_signal());
        libc::sigtimedwait(&set, std::ptr::null_mut(), &now);
    }
}

/// Kicks a thread. A thread that already ended, but was not joined, is left alone.
pub fn kick<T>(thread: &JoinHandle<T>) {
    if !thread.is_finished() {
        // SAFETY: the thread was not joined, for the handle still exists, so its id is valid.
        unsafe { libc::pthread_kill(thread.as_pthread_t(), kick_signal()) };
    }
}

/// How much processor time a thread has used.
pub fn cpu_time<T>(thread: &JoinHandle<T>) -> Duration {
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the thread was not joined, for the handle still exists; both places outlive the calls.
    let told = unsafe {
        libc::pthread_getcpuclockid(thread.as_pthread_t(), &mut clock) == 0
            && libc::clock_gettime(clock, &mut time) == 0
    };
    match told {
        true => Duration::new(time.tv_sec as u64, time.tv_nsec as u32),
        false => Duration::ZERO,
    }
}

/// Waits until `fd` is readable; false when `timeout` passed first.
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

/// Waits until one of two descriptors is readable or has ended; says which. Neither is, when `timeout` passed.
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

/// Opens a folder, to open its files beneath it.
pub fn open_dir(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_CLOEXEC).open(path)
}

/// Opens a file of a folder for reading: never through a link, and without waiting for a FIFO's writer.
pub fn open_beneath(dir: &File, name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    // SAFETY: the name ends in NUL and outlives the call; the descriptor is borrowed.
    let fd = unsafe { libc::openat(dir.as_raw_fd(), name.as_ptr(), flags) };
    match fd < 0 {
        true => Err(io::Error::last_os_error()),
        // SAFETY: a fresh descriptor that nobody else has.
        false => Ok(unsafe { File::from_raw_fd(fd) }),
    }
}

/// Opens a file or folder for reading if no link lies on the way to it, without waiting for a FIFO's writer.
pub fn open_without_links(path: &Path, flags: i32) -> io::Result<File> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let flags = flags | libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    // SAFETY: all zeros is a valid value of this plain structure.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = flags as u64;
    how.resolve = libc::RESOLVE_NO_SYMLINKS;
    // SAFETY: the path ends in NUL, and both it and the structure, whose size is told, outlive the call.
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
        // SAFETY: a fresh descriptor that nobody else has.
        Ok(fd) if fd >= 0 => Ok(unsafe { File::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes a lock that lives as long as the open file, or fails at once.
pub fn lock_file(file: &File) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) })
}

pub fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::fchmod(file.as_raw_fd(), mode) })
}

/// Renames, and fails if the new name is taken.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    rename(from, to, libc::RENAME_NOREPLACE)
}

/// Makes two names change places.
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

/// Where the next data of a file begins; none where only a hole is left.
pub fn next_data(file: &std::fs::File, from: u64) -> io::Result<Option<u64>> {
    seek_for(file, from, libc::SEEK_DATA)
}

/// Where the next hole of a file begins; its end counts as one.
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// Leaves sevens in a quarter of a mebibyte of stack, and says where.
    #[inline(never)]
    fn deep_call() -> u64 {
        let used = std::hint::black_box([7u8; 256 << 10]);
        used.as_ptr() as u64
    }

    fn byte_at(address: u64) -> u8 {
        let (memory, mut byte) = (File::open("/proc/self/mem").unwrap(), [0]);
        memory.read_exact_at(&mut byte, address).unwrap();
        byte[0]
    }

    #[test]
    fn stack_that_is_trimmed_is_given_back_and_goes_on() {
        let thread = thread::Builder::new().stack_size(1 << 20);
        let calls = thread.spawn(|| {
            let used = deep_call();
            let before = byte_at(used);
            trim_stack();
            let after = byte_at(used);
            (before, after, byte_at(deep_call()))
        });
        assert_eq!(calls.unwrap().join().unwrap(), (7, 0, 7));
    }
}
