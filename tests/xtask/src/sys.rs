//! System calls for which the standard library has no function, each as a safe function.
//!
//! All `unsafe` code of this tool is in this file and in `kernel/sys.rs`.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Returns the rate of this processor's clock (TSC) in kHz, measured over a tenth of a second.
pub fn tsc_khz() -> u64 {
    // A pair of time and count is the more exact, the closer together they are read.
    let look = || {
        let (before, count) = (Instant::now(), tsc());
        (before.elapsed(), before, count)
    };
    let closest = || (0..64).map(|_| look()).min_by_key(|(took, ..)| *took);
    let first = closest();
    std::thread::sleep(Duration::from_millis(100));
    let (Some((_, begun, from)), Some((_, ended, to))) = (first, closest()) else { return 0 };
    let micros = ended.duration_since(begun).as_nanos() / 1000;
    (u128::from(to.wrapping_sub(from)) * 1000 / micros.max(1)) as u64
}

fn tsc() -> u64 {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// A descriptor to wait for. `None` waits for nothing and keeps its place in the list.
pub struct Waiting<'a> {
    pub fd: Option<BorrowedFd<'a>>,
    pub events: i16,
}

pub const READABLE: i16 = libc::POLLIN;
pub const WRITABLE: i16 = libc::POLLOUT;

/// Waits until a descriptor is ready, and returns the events of each. Hang-ups and errors are
/// always reported. An interrupted wait returns no events.
pub fn poll<const N: usize>(
    waiting: [Waiting<'_>; N],
    timeout: Option<Duration>,
) -> io::Result<[i16; N]> {
    let mut fds = waiting.map(|w| libc::pollfd {
        fd: w.fd.map_or(-1, |fd| fd.as_raw_fd()),
        events: w.events,
        revents: 0,
    });
    let timeout_ms = timeout.map_or(-1, |t| t.as_millis().min(i32::MAX as u128) as i32);
    // SAFETY: `fds` is an array of N pollfd structs that outlives the call.
    match check(unsafe { libc::poll(fds.as_mut_ptr(), N as libc::nfds_t, timeout_ms) }) {
        Ok(_) => Ok(fds.map(|fd| fd.revents)),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok([0; N]),
        Err(e) => Err(e),
    }
}

/// Makes reads and writes on `fd` return instead of waiting.
pub fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: fcntl on a descriptor that the caller holds; no memory is passed.
    let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) })?;
    Ok(())
}

/// Returns a descriptor that becomes readable when the child `pid` has ended.
pub fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
    let fd = check(fd as libc::c_int)?;
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sends `signal` to the process group `group`.
pub fn kill_group(group: u32, signal: i32) -> io::Result<()> {
    // SAFETY: kill takes two integers.
    check(unsafe { libc::kill(-(group as libc::pid_t), signal) })?;
    Ok(())
}

/// Sends `signal` to one process.
pub fn kill(pid: u32, signal: i32) -> io::Result<()> {
    // SAFETY: kill takes two integers.
    check(unsafe { libc::kill(pid as libc::pid_t, signal) })?;
    Ok(())
}

/// Makes the child inherit `fds`, and be killed when the calling thread ends, however it ends.
///
/// The kernel ties the signal to the thread, not to the process. `spawn` must be called from a
/// thread that lives as long as the child may.
pub fn die_with_parent(command: &mut Command, fds: Vec<RawFd>) {
    let parent = std::process::id() as libc::pid_t;
    let in_child = move || {
        // SAFETY: between fork and exec there are only async-signal-safe calls on integers.
        unsafe {
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            // The parent may have ended before prctl was called.
            if libc::getppid() != parent {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            for fd in &fds {
                check(libc::fcntl(*fd, libc::F_SETFD, 0))?;
            }
        }
        Ok(())
    };
    // SAFETY: the closure allocates nothing and takes no lock.
    unsafe { command.pre_exec(in_child) };
}

/// Makes the child the leader of a new session without a terminal.
pub fn new_session(command: &mut Command) {
    // SAFETY: setsid is async-signal-safe and takes nothing.
    unsafe { command.pre_exec(|| check(libc::setsid()).map(drop)) };
}

/// Gives `command` the default handling of the signals of a terminal, whatever this process
/// ignores. A shell ignores INT and QUIT for commands in the background, and children inherit that.
pub fn with_default_signals(command: &mut Command) {
    let reset = || {
        for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGTERM] {
            // SAFETY: between fork and exec; `signal` is async-signal-safe and the numbers are
            // valid.
            if unsafe { libc::signal(signal, libc::SIG_DFL) } == libc::SIG_ERR {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the closure only makes async-signal-safe calls and allocates nothing.
    unsafe { command.pre_exec(reset) };
}

/// Takes an exclusive lock on `file`, and waits at most `timeout`. Returns false if another process
/// still holds it.
pub fn lock(file: &File, timeout: Duration) -> io::Result<bool> {
    let until = Instant::now() + timeout;
    loop {
        // SAFETY: flock takes two integers.
        match check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }) {
            Ok(_) => return Ok(true),
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
            Err(_) if Instant::now() >= until => return Ok(false),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

static SIGNAL_PIPE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn note_signal(signal: libc::c_int) {
    let byte = signal as u8;
    let fd = SIGNAL_PIPE.load(Ordering::Relaxed);
    // SAFETY: write is async-signal-safe and `byte` is on this stack. A full pipe loses the signal,
    // but only after thousands of unread ones.
    unsafe { libc::write(fd, (&raw const byte).cast(), 1) };
}

/// Turns the given signals into bytes on the returned pipe, until this process ends.
pub fn signals_as_bytes(signals: &[i32]) -> io::Result<io::PipeReader> {
    let (reader, writer) = io::pipe()?;
    set_nonblocking(&reader)?;
    set_nonblocking(&writer)?;
    SIGNAL_PIPE.store(OwnedFd::from(writer).into_raw_fd_forever(), Ordering::Relaxed);
    for &signal in signals {
        // SAFETY: a zeroed sigaction with a handler that is async-signal-safe.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note_signal as *const () as usize;
            check(libc::sigaction(signal, &action, std::ptr::null_mut()))?;
        }
    }
    Ok(reader)
}

trait Forever {
    /// Passes the descriptor to the signal handler, which may use it until the process ends.
    fn into_raw_fd_forever(self) -> RawFd;
}

impl Forever for OwnedFd {
    fn into_raw_fd_forever(self) -> RawFd {
        use std::os::fd::IntoRawFd;
        self.into_raw_fd()
    }
}

/// Waits for a child and collects it. A first process also inherits orphans.
pub fn reap_one() -> io::Result<u32> {
    // SAFETY: a null status pointer is allowed.
    let pid = check(unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) })?;
    Ok(pid as u32)
}

/// Writes all data to disk and powers the machine off. Returns only if that fails.
pub fn power_off() -> io::Error {
    // SAFETY: no memory is passed; reboot returns only on failure.
    unsafe {
        libc::sync();
        libc::reboot(libc::RB_POWER_OFF);
    }
    io::Error::last_os_error()
}

/// Sets the clock of this machine.
pub fn set_clock(since_epoch: Duration) -> io::Result<()> {
    let time = libc::timespec {
        tv_sec: since_epoch.as_secs() as libc::time_t,
        tv_nsec: since_epoch.subsec_nanos().into(),
    };
    // SAFETY: `time` outlives the call.
    check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &time) })?;
    Ok(())
}

/// Raises the hard limit of open files for this process and its children to `limit`.
pub fn raise_open_files(limit: u64) -> io::Result<()> {
    let wanted = libc::rlimit { rlim_cur: 1024.min(limit), rlim_max: limit };
    // SAFETY: `wanted` outlives the call.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &wanted) })?;
    Ok(())
}

/// Returns the effective user of this process.
pub fn user_id() -> u32 {
    // SAFETY: geteuid takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Returns whether this process runs as root.
pub fn is_root() -> bool {
    user_id() == 0
}

/// The rows and columns of a terminal.
pub type Size = (u16, u16);

/// Makes a new pseudoterminal. Returns the user's end and the program's end.
pub fn open_terminal(size: Size) -> io::Result<(OwnedFd, OwnedFd)> {
    let (mut person, mut program) = (-1, -1);
    let window = window(size);
    // SAFETY: both descriptors and the window size outlive the call; a null name and null settings
    // are allowed.
    unsafe {
        check(libc::openpty(
            &mut person,
            &mut program,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            &window,
        ))?;
        // Started programs do not inherit the descriptors; they would keep the terminal open.
        check(libc::fcntl(person, libc::F_SETFD, libc::FD_CLOEXEC))?;
        check(libc::fcntl(program, libc::F_SETFD, libc::FD_CLOEXEC))?;
        Ok((OwnedFd::from_raw_fd(person), OwnedFd::from_raw_fd(program)))
    }
}

/// Makes the child the leader of a session whose terminal is its stdin.
pub fn on_its_terminal(command: &mut Command) {
    let in_child = || {
        // SAFETY: async-signal-safe calls on integers.
        unsafe {
            check(libc::setsid())?;
            check(libc::ioctl(0, libc::TIOCSCTTY, 0))?;
        }
        Ok(())
    };
    // SAFETY: the closure allocates nothing and takes no lock.
    unsafe { command.pre_exec(in_child) };
}

/// Returns the size of the terminal behind `fd`. Fails if `fd` is not a terminal.
pub fn terminal_size(fd: impl AsFd) -> io::Result<Size> {
    let mut window = window((0, 0));
    // SAFETY: `window` outlives the call.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TIOCGWINSZ, &mut window) })?;
    Ok((window.ws_row, window.ws_col))
}

pub fn set_terminal_size(fd: impl AsFd, size: Size) -> io::Result<()> {
    let window = window(size);
    // SAFETY: `window` outlives the call.
    check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &window) })?;
    Ok(())
}

fn window((rows, columns): Size) -> libc::winsize {
    libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

/// A terminal in raw mode: keys arrive one by one and uninterpreted. Dropping the value restores
/// the mode.
pub struct RawTerminal {
    terminal: OwnedFd,
    before: libc::termios,
}

impl RawTerminal {
    pub fn new(terminal: impl AsFd) -> io::Result<Self> {
        let terminal = terminal.as_fd().try_clone_to_owned()?;
        // SAFETY: a termios is plain data, filled in by the first call, and outlives all calls.
        unsafe {
            let mut before: libc::termios = std::mem::zeroed();
            check(libc::tcgetattr(terminal.as_raw_fd(), &mut before))?;
            let mut raw = before;
            libc::cfmakeraw(&mut raw);
            check(libc::tcsetattr(terminal.as_raw_fd(), libc::TCSANOW, &raw))?;
            Ok(RawTerminal { terminal, before })
        }
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // SAFETY: `before` came from tcgetattr and outlives the call.
        unsafe { libc::tcsetattr(self.terminal.as_raw_fd(), libc::TCSANOW, &self.before) };
    }
}
