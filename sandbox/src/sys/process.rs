//! Processes: fork without exec, exec of this program, sessions, parent death, exit.
//!
//! The monitor process runs the launcher's own program, so that no second one has to be found.
#![allow(unsafe_code)] // fork, setsid, prctl, dup2, kill, waitpid.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// Returns free memory of the allocator to the kernel.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the allocator locks its own structures, and touches nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The side of a fork that the caller is on.
pub enum Side {
    Parent(Child),
    Child,
}

/// A child process.
#[derive(Debug)]
pub struct Child {
    pid: libc::pid_t,
    ended: Option<Ended>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Code(i32),
    Signal(i32),
}

impl Ended {
    fn of(status: libc::c_int) -> Self {
        if libc::WIFEXITED(status) {
            Self::Code(libc::WEXITSTATUS(status))
        } else {
            Self::Signal(libc::WTERMSIG(status))
        }
    }
}

/// Forks the process. Fails if there are several threads: the child would have their locks but not
/// the threads.
pub fn fork() -> io::Result<Side> {
    // A thread that was just joined may still be listed.
    let deadline = Instant::now() + Duration::from_secs(1);
    loop {
        match std::fs::read_dir("/proc/self/task")?.count() {
            1 => break,
            _ if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            threads => return Err(io::Error::other(format!("{threads} threads, fork needs one"))),
        }
    }
    // SAFETY: the process has a single thread, so the child's copy of its state is consistent.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Side::Child),
        pid => Ok(Side::Parent(Child { pid, ended: None })),
    }
}

/// Executes this program again, under another name, with `stdin` as its standard input. The new
/// process has its own address space layout and stack canary.
pub fn exec_self(name: &str, stdin: OwnedFd) -> io::Result<Child> {
    // The link leads to the running program, even if its file has been replaced.
    let child = Command::new("/proc/self/exe").arg0(name).stdin(stdin).spawn()?;
    let pid = libc::pid_t::try_from(child.id()).map_err(io::Error::other)?;
    Ok(Child { pid, ended: None })
}

impl Child {
    /// The child with this process id, which nobody else waits for.
    pub fn of(pid: u32) -> Self {
        Self { pid: pid as libc::pid_t, ended: None }
    }

    pub fn pid(&self) -> u32 {
        self.pid.unsigned_abs()
    }

    pub fn kill(&self) {
        if self.ended.is_none() {
            // SAFETY: no pointers; the child has not been waited for, so its pid is not reused.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
        }
    }

    /// Whether the child has ended; if so, it is not left as a zombie.
    pub fn has_ended(&mut self) -> bool {
        if self.ended.is_none() {
            let mut status = 0;
            // SAFETY: `status` outlives the call.
            match unsafe { libc::waitpid(self.pid, &mut status, libc::WNOHANG) } {
                0 => return false,
                _ => self.ended = Some(Ended::of(status)),
            }
        }
        true
    }

    /// Waits for the child's end. Blocks, so call it only after something that ends the child.
    pub fn wait(&mut self) -> io::Result<Ended> {
        if let Some(ended) = self.ended {
            return Ok(ended);
        }
        let mut status = 0;
        loop {
            // SAFETY: `status` outlives the call.
            if unsafe { libc::waitpid(self.pid, &mut status, 0) } >= 0 {
                break;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        let ended = Ended::of(status);
        self.ended = Some(ended);
        Ok(ended)
    }
}

/// Starts a new session, without a terminal and its signals.
pub fn own_session() -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::setsid() })
}

/// Makes the kernel kill this process when its parent ends; exits if that has already happened.
/// `parent` is a pipe whose other end only the parent has. A change of user cancels it.
pub fn die_with_parent(parent: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })?;
    // The parent may have ended before the call above. In a PID namespace of its own this process
    // cannot ask for its parent's id.
    if super::poll::readable(&[parent], Some(Duration::ZERO))?[0] {
        leave_now(1);
    }
    Ok(())
}

/// Sets the name that `ps` and `top` show for this process.
pub fn set_name(name: &CStr) {
    // SAFETY: the kernel reads at most 16 bytes of a terminated string. Only a label: failure is
    // harmless.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

/// Redirects standard input from `input`, and standard output and error to `output`.
pub fn redirect_stdio(input: &File, output: &File) -> io::Result<()> {
    for (from, to) in [(input, 0), (output, 1), (output, 2)] {
        // SAFETY: both descriptors are open; the old target is closed by the kernel.
        check(unsafe { libc::dup2(from.as_raw_fd(), to) })?;
    }
    Ok(())
}

/// Closes descriptors that this process inherited from its caller: a process that stays would keep
/// them open.
///
/// Every descriptor that this program opens is close-on-exec; those inherited through exec are not.
pub fn close_inherited() -> io::Result<()> {
    let open = std::fs::read_dir("/proc/self/fd")?;
    let numbers: Vec<i32> =
        open.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    for fd in numbers.into_iter().filter(|fd| *fd > 2) {
        // SAFETY: no pointers; a descriptor without the flag is owned by no value of this program.
        unsafe {
            let flags = libc::fcntl(fd, libc::F_GETFD);
            if flags >= 0 && flags & libc::FD_CLOEXEC == 0 {
                libc::close(fd);
            }
        }
    }
    Ok(())
}

/// Exits at once, without running the parent's copied exit handlers or flushing its buffers.
pub fn leave_now(code: i32) -> ! {
    // SAFETY: never returns and touches no memory of ours.
    unsafe { libc::_exit(code) }
}

/// Makes a nameless file in memory with these bytes, which programs that this one executes inherit.
pub fn memory_file(name: &CStr, bytes: &[u8]) -> io::Result<File> {
    // SAFETY: the kernel reads a terminated string; the result is a new descriptor.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), 0) };
    check(fd)?;
    // SAFETY: the descriptor was just made and has no other owner.
    let mut file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file)
}

/// Takes a descriptor that the program which executed this one left open. Each number is taken
/// once.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    if number <= 2 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: no pointers; the call fails if there is no such descriptor.
    check(unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    // SAFETY: the descriptor is open and was left to this process; no other value owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Makes two ends of a Unix socket that keeps messages apart.
pub fn packet_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the kernel writes two descriptors, which have no other owner.
    unsafe {
        check(libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()))?;
        Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])))
    }
}

/// Puts descriptors at these numbers, which follow the standard ones, and closes all others. For a
/// forked process that no value of its parent's is dropped in any more.
pub fn keep_only(places: &[(BorrowedFd<'_>, i32)]) -> io::Result<()> {
    // Out of the way first: a number may be that of a descriptor that comes later.
    let mut aside = Vec::with_capacity(places.len());
    for (fd, number) in places {
        // SAFETY: no pointers.
        let moved = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD, 64) };
        check(moved)?;
        aside.push((moved, *number));
    }
    let mut last = 2;
    for (fd, number) in aside {
        // SAFETY: no pointers; the old target belongs to a value that is never dropped.
        check(unsafe { libc::dup2(fd, number) })?;
        last = last.max(number);
    }
    // SAFETY: no pointers; as above.
    check(unsafe { libc::syscall(libc::SYS_close_range, last as u32 + 1, u32::MAX, 0) } as i32)
}

/// A handle (pidfd) of a process that another launcher started; it cannot come to mean another one.
#[derive(Debug)]
pub struct Other {
    fd: OwnedFd,
}

impl Other {
    /// Opens the process that has this pid now; the caller must then check that it is the expected
    /// one.
    pub fn open(pid: u32) -> io::Result<Self> {
        let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
        // SAFETY: no pointers; the result is a new descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as libc::c_int;
        check(fd)?;
        // SAFETY: the descriptor was just made and has no other owner.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    pub fn signal(&self, signal: i32) -> io::Result<()> {
        let (fd, none) = (self.fd.as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
        // SAFETY: the descriptor is open, and no details are passed with the signal.
        let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, none, 0) };
        check(sent as libc::c_int)
    }
}

/// Returns the host's monotonic clock in microseconds.
pub fn monotonic_us() -> u64 {
    clock_us(libc::CLOCK_MONOTONIC)
}

pub fn cpu_us() -> u64 {
    clock_us(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn clock_us(clock: libc::clockid_t) -> u64 {
    // SAFETY: all zero is a valid timespec, which the call fills; these clocks always exist.
    let time = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(clock, &mut time);
        time
    };
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
}

/// Returns this process's effective user id.
pub fn effective_uid() -> u32 {
    // SAFETY: no pointers, never fails.
    unsafe { libc::geteuid() }
}

/// Returns this process's effective user and group ids.
pub fn effective_ids() -> (u32, u32) {
    // SAFETY: no pointers, never fails.
    unsafe { (libc::geteuid(), libc::getegid()) }
}

/// Returns `N` unpredictable bytes.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // SAFETY: the buffer is `N` bytes long; a request this small is answered whole.
    let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    if usize::try_from(count) == Ok(N) { Ok(bytes) } else { Err(io::Error::last_os_error()) }
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Limits malloc to one arena. A VM's threads allocate little, and an arena for each would cost
/// more memory than all their allocations.
pub fn keep_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: passes a number to the allocator, before any other thread runs.
    unsafe {
        // Only an optimization: on failure there are more arenas.
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Returns the processor time that this process has used.
pub fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, which lives across the call.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}
