//! The system calls, each with the reason why it is sound.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

/// The side of a fork that the caller is on.
pub enum Forked {
    Parent(u32),
    Child,
}

pub enum Clock {
    Monotonic,
    Process,
}

fn check(result: i64) -> io::Result<i64> {
    match result {
        0.. => Ok(result),
        _ => Err(io::Error::last_os_error()),
    }
}

fn path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Closes every file descriptor from `first` on.
pub fn close_from(first: u32) -> io::Result<()> {
    // SAFETY: nothing in this process owns a descriptor yet.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) }).map(drop)
}

/// Sets the umask, so that files are private to their user whatever the caller's umask was.
pub fn set_umask(mask: libc::mode_t) {
    // SAFETY: no memory is passed.
    unsafe { libc::umask(mask) };
}

/// Unblocks all signals and resets their actions: blocked and ignored signals survive exec.
pub fn forget_signals() -> io::Result<()> {
    // SAFETY: the set lives across both calls, the first of which fills it; handlers become the
    // default, so no handler of this program is left.
    unsafe {
        let mut none: libc::sigset_t = mem::zeroed();
        check(libc::sigemptyset(&mut none).into())?;
        check(libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut()).into())?;
        for signal in 1..=libc::SIGRTMAX() {
            // Two signals cannot be changed, and some belong to the C library; errors are ignored.
            libc::signal(signal, libc::SIG_DFL);
        }
    }
    Ok(())
}

pub fn time_us(clock: Clock) -> u64 {
    let clock = match clock {
        Clock::Monotonic => libc::CLOCK_MONOTONIC,
        Clock::Process => libc::CLOCK_PROCESS_CPUTIME_ID,
    };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, which lives across the call.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
}

pub fn join_network(namespace: &Path) -> io::Result<()> {
    let file = File::open(namespace)?;
    // SAFETY: no memory is passed; the descriptor is open.
    check(unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) }.into()).map(drop)
}

pub fn limit(resource: libc::__rlimit_resource_t, most: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the kernel reads one struct, which lives across the call.
    check(unsafe { libc::setrlimit(resource, &limit) }.into()).map(drop)
}

/// Enters a new mount namespace that receives later mounts of the host but propagates none back.
pub fn unshare_mounts() -> io::Result<()> {
    let flags = libc::MS_SLAVE | libc::MS_REC;
    // SAFETY: no memory but a constant string is passed.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS).into())?;
        check(libc::mount(ptr::null(), c"/".as_ptr(), ptr::null(), flags, ptr::null()).into())
    }
    .map(drop)
}

/// Bind-mounts a folder on itself, because a new root must be a mount point.
pub fn bind_on_itself(folder: &Path) -> io::Result<()> {
    let folder = path(folder)?;
    let flags = libc::MS_BIND | libc::MS_REC;
    // SAFETY: strings that live across the call.
    let done =
        unsafe { libc::mount(folder.as_ptr(), folder.as_ptr(), ptr::null(), flags, ptr::null()) };
    check(done.into()).map(drop)
}

pub fn pivot_root(new: &Path, old: &Path) -> io::Result<()> {
    let (new, old) = (path(new)?, path(old)?);
    // SAFETY: strings that live across the call.
    check(unsafe { libc::syscall(libc::SYS_pivot_root, new.as_ptr(), old.as_ptr()) }).map(drop)
}

pub fn detach(mount: &Path) -> io::Result<()> {
    let mount = path(mount)?;
    // SAFETY: a string that lives across the call.
    check(unsafe { libc::umount2(mount.as_ptr(), libc::MNT_DETACH) }.into()).map(drop)
}

/// Creates a character device that only its owner may use.
pub fn make_node(node: &Path, major: u32, minor: u32) -> io::Result<()> {
    let node = path(node)?;
    let mode = libc::S_IFCHR | libc::S_IRUSR | libc::S_IWUSR;
    // SAFETY: a string that lives across the call.
    check(unsafe { libc::mknod(node.as_ptr(), mode, libc::makedev(major, minor)) }.into()).map(drop)
}

pub fn fork() -> io::Result<Forked> {
    // SAFETY: this process has one thread, so the child may do whatever the parent may.
    forked(unsafe { libc::fork() }.into())
}

/// Forks a child that is the first process of a new PID namespace.
pub fn fork_with_pids() -> io::Result<Forked> {
    let flags = (libc::CLONE_NEWPID | libc::SIGCHLD) as libc::c_ulong;
    // SAFETY: as a fork; no memory is passed, and the child continues on a copy of this stack.
    forked(unsafe { libc::syscall(libc::SYS_clone, flags, 0usize, 0usize, 0usize, 0usize) })
}

fn forked(pid: i64) -> io::Result<Forked> {
    Ok(match check(pid)? {
        0 => Forked::Child,
        pid => Forked::Parent(pid as u32),
    })
}

pub fn new_session() -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::setsid() }.into()).map(drop)
}

pub fn leads_session() -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::getsid(0) == libc::getpid() }
}

/// Exits without running exit handlers.
pub fn end(status: i32) -> ! {
    // SAFETY: ends the process.
    unsafe { libc::_exit(status) }
}

/// Makes the descriptor `standard` a duplicate of `file`.
pub fn put_in_place(file: &File, standard: i32) -> io::Result<()> {
    // SAFETY: no memory is passed; the replaced descriptor is standard input or output, which no
    // value owns.
    check(unsafe { libc::dup2(file.as_raw_fd(), standard) }.into()).map(drop)
}

/// Drops all other groups and users permanently.
pub fn become_user(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: no memory is passed but an empty list.
    unsafe {
        check(libc::setgroups(0, ptr::null()).into())?;
        check(libc::setresgid(gid, gid, gid).into())?;
        check(libc::setresuid(uid, uid, uid).into()).map(drop)
    }
}

/// Executes a program with an empty environment; returns only on failure.
pub fn execute(words: &[CString]) -> io::Error {
    let Some(program) = words.first() else { return io::ErrorKind::InvalidInput.into() };
    let mut pointers: Vec<*const libc::c_char> = words.iter().map(|word| word.as_ptr()).collect();
    pointers.push(ptr::null());
    let environment: [*const libc::c_char; 1] = [ptr::null()];
    let program: &CStr = program;
    // SAFETY: lists that end in a null, of strings that live across the call.
    unsafe { libc::execve(program.as_ptr(), pointers.as_ptr(), environment.as_ptr()) };
    io::Error::last_os_error()
}

#[cfg(test)]
pub fn user() -> u32 {
    // SAFETY: no memory is passed.
    unsafe { libc::getuid() }
}

#[cfg(test)]
pub fn group() -> u32 {
    // SAFETY: no memory is passed.
    unsafe { libc::getgid() }
}
