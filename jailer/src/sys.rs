//! The system calls, each with the reason why it is sound.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

/// The flag of clone3(2); the constant of the `libc` crate has too few bits.
const CLONE_INTO_CGROUP: u64 = 1 << 33;

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

/// Returns whether this process has root's user id.
pub fn is_root() -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::geteuid() == 0 }
}

/// Forks a child into new namespaces and, if one is given, into a control group of version 2. This
/// process must have a single thread.
pub fn fork_into(namespaces: i32, group: Option<BorrowedFd<'_>>) -> io::Result<Forked> {
    // SAFETY: all zero is a valid value of this struct of numbers.
    let mut how: libc::clone_args = unsafe { mem::zeroed() };
    how.flags = namespaces as u64;
    how.exit_signal = libc::SIGCHLD as u64;
    if let Some(group) = group {
        how.flags |= CLONE_INTO_CGROUP;
        how.cgroup = group.as_raw_fd() as u64;
    }
    let size = mem::size_of::<libc::clone_args>();
    // SAFETY: as a fork of a process with one thread: the child goes on with a copy of this stack
    // and of all locks, none of which another thread holds. The struct lives across the call.
    match forked(unsafe { libc::syscall(libc::SYS_clone3, &raw const how, size) }) {
        // A filter around a container may not know the call, and then a group cannot be had.
        Err(error) if group.is_none() && error.raw_os_error() == Some(libc::ENOSYS) => {
            let flags = (namespaces | libc::SIGCHLD) as libc::c_ulong;
            // SAFETY: as above.
            forked(unsafe { libc::syscall(libc::SYS_clone, flags, 0usize, 0usize, 0usize, 0usize) })
        }
        forked => forked,
    }
}

/// Returns whether a folder is in a hierarchy of control groups of version 2.
pub fn is_cgroup2(folder: &File) -> io::Result<bool> {
    // SAFETY: all zero is a valid value, which the kernel fills; it lives across the call.
    let facts = unsafe {
        let mut facts: libc::statfs = mem::zeroed();
        check(libc::fstatfs(folder.as_raw_fd(), &mut facts).into())?;
        facts
    };
    Ok(facts.f_type == libc::CGROUP2_SUPER_MAGIC)
}

/// Returns the real user and group of this process.
pub fn own_ids() -> (u32, u32) {
    // SAFETY: no memory is passed.
    unsafe { (libc::getuid(), libc::getgid()) }
}

/// Maps a user and a group to themselves in this process's new user namespace. They must be those
/// that the process had outside; nobody else can be mapped without privileges.
pub fn map_own_user(user: u32, group: u32) -> io::Result<()> {
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    std::fs::write("/proc/self/uid_map", format!("{user} {user} 1"))
}

pub fn unshare(namespaces: i32) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::unshare(namespaces) }.into()).map(drop)
}

/// Cuts this mount namespace off from the host's: no mount or unmount passes in either direction.
pub fn make_mounts_private() -> io::Result<()> {
    let flags = libc::MS_PRIVATE | libc::MS_REC;
    // SAFETY: no memory but a constant string is passed.
    let done = unsafe { libc::mount(ptr::null(), c"/".as_ptr(), ptr::null(), flags, ptr::null()) };
    check(done.into()).map(drop)
}

/// Clones the mount of a folder; the clone is attached nowhere yet.
pub fn clone_mount(folder: &Path) -> io::Result<OwnedFd> {
    let folder = path(folder)?;
    let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
    // SAFETY: a string that lives across the call.
    let fd = check(unsafe {
        libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, folder.as_ptr(), flags)
    })?;
    // SAFETY: the descriptor was just made and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Attaches a cloned mount at a folder.
pub fn attach_mount(mount: BorrowedFd<'_>, at: &Path) -> io::Result<()> {
    let at = path(at)?;
    // SAFETY: strings that live across the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            at.as_ptr(),
            libc::MOVE_MOUNT_F_EMPTY_PATH,
        )
    };
    check(done).map(drop)
}

/// Mounts an empty file system with room for a few folders over `at`.
pub fn mount_empty(at: &Path) -> io::Result<()> {
    let at = path(at)?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    let options = c"mode=0755,size=4k,nr_inodes=8";
    // SAFETY: strings that live across the call.
    let done = unsafe {
        libc::mount(
            c"tmpfs".as_ptr(),
            at.as_ptr(),
            c"tmpfs".as_ptr(),
            flags,
            options.as_ptr().cast(),
        )
    };
    check(done.into()).map(drop)
}

/// Forbids devices, set-user-ID programs and execution in the mount at a folder, and writing if
/// `read_only`.
pub fn restrict_mount(at: &Path, read_only: bool) -> io::Result<()> {
    let at = path(at)?;
    // SAFETY: all zero is a valid value of this struct of numbers.
    let mut attributes: libc::mount_attr = unsafe { mem::zeroed() };
    attributes.attr_set =
        libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
    if read_only {
        attributes.attr_set |= libc::MOUNT_ATTR_RDONLY;
    }
    let size = mem::size_of::<libc::mount_attr>();
    // SAFETY: a string and a struct of the given size, which live across the call.
    let done = unsafe {
        let attributes = &raw const attributes;
        libc::syscall(libc::SYS_mount_setattr, libc::AT_FDCWD, at.as_ptr(), 0, attributes, size)
    };
    check(done).map(drop)
}

/// Makes a mount point the root and forgets the old one.
pub fn change_root(root: &Path) -> io::Result<()> {
    std::env::set_current_dir(root)?;
    // The old root is mounted over the new one, and is then on top.
    pivot_root(Path::new("."), Path::new("."))?;
    detach(Path::new("."))?;
    std::env::set_current_dir("/")
}

/// Lowers a limit to `most`; one that is lower already stays.
pub fn lower_limit(resource: libc::__rlimit_resource_t, most: u64) -> io::Result<()> {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one struct, which lives across the call.
    check(unsafe { libc::getrlimit(resource, &mut now) }.into())?;
    limit(resource, most.min(now.rlim_max))
}

/// Empties the bounding set, so that no program can give a capability back.
pub fn clear_bounding_set() -> io::Result<()> {
    for capability in 0..64 {
        // SAFETY: no memory is passed.
        match check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability) }.into()) {
            // The kernel has no more of them.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
            // A process without privileges cannot, and need not: it may not gain any either.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => break,
            dropped => dropped.map(drop)?,
        }
    }
    Ok(())
}

/// Empties the effective, permitted, inheritable and ambient sets.
pub fn clear_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    let header = Header { version: VERSION_3, pid: 0 };
    let none = [0u32; 6];
    // SAFETY: the kernel reads one header and two triples of 32 bits, which live across the call.
    unsafe {
        let clear_all = libc::PR_CAP_AMBIENT_CLEAR_ALL;
        check(libc::prctl(libc::PR_CAP_AMBIENT, clear_all, 0, 0, 0).into())?;
        check(libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr())).map(drop)
    }
}

/// Makes sure that no program that this process executes has more privileges.
pub fn forbid_new_privileges() -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }.into()).map(drop)
}

/// Removes the environment and overwrites its strings. No other thread may use it.
pub fn forget_environment() {
    unsafe extern "C" {
        static mut environ: *mut *mut libc::c_char;
    }
    // SAFETY: the process has a single thread; the list ends in a null, and each of its strings is
    // writable memory that ends in a zero byte, which is not overwritten.
    unsafe {
        let mut entry = environ;
        while !entry.is_null() && !(*entry).is_null() {
            ptr::write_bytes(*entry, 0, libc::strlen(*entry));
            entry = entry.add(1);
        }
        libc::clearenv();
    }
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
