//! Signals read from a file descriptor, instead of handlers that interrupt.
//!
//! The launcher forwards them to a guest and the monitor process shuts down on them; both handle
//! them in their event loops.
#![allow(unsafe_code)] // sigprocmask, signalfd, sigaction, fcntl and raise.

use std::fs::File;
use std::io::{self, Read};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::process;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use super::poll;

/// The signals that people and services send to end or interrupt a command.
pub const FORWARDED: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// The signals held with a terminal in raw mode: all that would end the process without restoring
/// the terminal, and window size changes.
pub const WITH_TERMINAL: [i32; 8] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGWINCH,
];

/// The command that sets the signal of a descriptor, which `libc` lacks.
const F_SETSIG: libc::c_int = 10;

/// The last signal caught by [`catch_interrupts`], or 0.
static CAUGHT: AtomicI32 = AtomicI32::new(0);

/// Installs handlers so that these signals ask the sandbox library's long work to stop and clean
/// up.
///
/// A signal that is ignored, as SIGHUP is under nohup, stays ignored.
pub fn catch_interrupts() {
    extern "C" fn caught(signal: libc::c_int) {
        CAUGHT.store(signal, Ordering::Relaxed);
    }
    for signal in FORWARDED {
        // SAFETY: all zero is a valid sigaction; the handler only stores to an atomic, which is
        // async-signal-safe, and SA_RESTART restarts interrupted calls.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, std::ptr::null(), &mut action);
            if action.sa_sigaction != libc::SIG_IGN {
                action.sa_sigaction = caught as extern "C" fn(libc::c_int) as libc::sighandler_t;
                action.sa_flags = libc::SA_RESTART;
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }
}

/// Returns the signal that was caught, if any.
pub fn caught() -> Option<i32> {
    Some(CAUGHT.load(Ordering::Relaxed)).filter(|signal| *signal != 0)
}

/// Makes the kernel send SIGTERM to this process when the last writer of `pipe` is gone, and also
/// when something is written to it.
pub fn terminate_when_closed(pipe: BorrowedFd<'_>) -> io::Result<()> {
    let fcntl = |command: libc::c_int, argument: libc::c_int| {
        // SAFETY: the descriptor is open, and these commands take a number.
        let result = unsafe { libc::fcntl(pipe.as_raw_fd(), command, argument) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    };
    fcntl(libc::F_SETOWN, process::id().cast_signed())?;
    fcntl(F_SETSIG, libc::SIGTERM)?;
    let flags = fcntl(libc::F_GETFL, 0)?;
    fcntl(libc::F_SETFL, flags | libc::O_ASYNC)?;
    if poll::readable(&[pipe], Some(Duration::ZERO))?[0] {
        // The writer was gone before the call above.
        // SAFETY: no pointers.
        unsafe { libc::raise(libc::SIGTERM) };
    }
    Ok(())
}

/// Makes each of these signals end the process at once with its exit code. For signals that report
/// a fault of the process itself, after which it cannot continue.
pub fn end_with(codes: &'static [(i32, u8)]) {
    static CODES: OnceLock<&'static [(i32, u8)]> = OnceLock::new();
    extern "C" fn end(signal: libc::c_int, facts: *const libc::siginfo_t, _: *const libc::c_void) {
        if signal == libc::SIGSYS {
            // SAFETY: the kernel passes the facts of this signal.
            report_call(unsafe { call_number(facts) });
        }
        let codes = CODES.get().copied().unwrap_or_default();
        let code = codes.iter().find(|(of, _)| *of == signal).map_or(1, |(_, code)| *code);
        super::process::leave_now(code.into())
    }
    // Only the first table counts, and there is only one.
    let _ = CODES.set(codes);
    for (signal, _) in codes {
        // SAFETY: all zero is a valid sigaction, and the handler has the form that SA_SIGINFO asks
        // for; it only reads a table that was written before, writes and exits, which is
        // async-signal-safe.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = end as *const () as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(*signal, &action, std::ptr::null_mut());
        }
    }
}

/// Returns the system call that a filter has refused.
///
/// # Safety
/// `facts` must be those of a SIGSYS.
unsafe fn call_number(facts: *const libc::siginfo_t) -> u32 {
    /// Where the kernel puts `si_syscall`, for which libc has no name.
    const OFFSET: usize = 24;
    // SAFETY: inside of the structure, and aligned; the caller has promised the rest.
    unsafe { facts.cast::<u8>().add(OFFSET).cast::<u32>().read() }
}

/// Says on standard error which call a filter has refused, without an allocation.
fn report_call(number: u32) {
    use std::io::Write;
    let mut line = [0u8; 80];
    let mut rest = &mut line[..];
    let _ = writeln!(rest, "Shutting down: the filter of a thread forbids system call {number}.");
    let left = rest.len();
    let length = line.len() - left;
    // SAFETY: the kernel reads the bytes of the line.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), length) };
}

/// A set of signals that are blocked and read from a descriptor instead.
pub struct Signals {
    fd: File,
}

impl Signals {
    /// Blocks the signals in this thread and those that it starts, and reads them from here on.
    pub fn hold(signals: &[i32]) -> io::Result<Self> {
        let set = set_of(signals);
        // SAFETY: `set` is initialised; no old mask is asked for.
        if unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `set` is initialised; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and has no other owner.
        Ok(Self { fd: unsafe { File::from_raw_fd(fd) } })
    }

    /// Whether a signal has arrived that has not been read.
    pub fn is_pending(&self) -> bool {
        super::poll::readable(&[self.as_fd()], Some(Duration::ZERO)).is_ok_and(|ready| ready[0])
    }

    /// Returns the next signal's number; blocks until there is one.
    pub fn next(&self) -> io::Result<i32> {
        // Only the first field, `ssi_signo`, is used; the kernel writes whole records.
        let mut record = [0u8; size_of::<libc::signalfd_siginfo>()];
        (&self.fd).read_exact(&mut record)?;
        Ok(i32::from_ne_bytes([record[0], record[1], record[2], record[3]]))
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Unblocks all signals, for a process that was forked while they were held.
pub fn release_all() {
    let set = set_of(&[]);
    // SAFETY: `set` is initialised; no old mask is asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &set, std::ptr::null_mut()) };
}

/// Ends this process by `signal` itself, so that a shell sees the usual status.
pub fn die_of(signal: i32) {
    let set = set_of(&[signal]);
    // SAFETY: the default action needs no handler; the mask is this thread's own; raise has no
    // pointer.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, std::ptr::null_mut());
        libc::raise(signal);
    }
}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set that sigaddset then changes.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), *signal);
        }
        set.assume_init()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_signal_is_read_instead_of_taken() {
        let signals = Signals::hold(&[libc::SIGUSR1]).unwrap();
        // SAFETY: the signal goes to this thread, which holds it.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR1) };
        assert_eq!(signals.next().unwrap(), libc::SIGUSR1);
    }
}
