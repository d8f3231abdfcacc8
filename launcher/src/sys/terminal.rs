//! The terminal that pvmm runs in: its size, and raw mode while a guest's program has it.
//!
//! Raw mode must never outlive us, so what was before is kept where every way out of the process finds
//! it: the guard's drop, `exit::leave` and a panic.
#![allow(unsafe_code)] // tcgetattr, tcsetattr and TIOCGWINSZ.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use pvmm::exec::WindowSize;

/// The terminal in raw mode and the mode it had before.
static BEFORE: Mutex<Option<(OwnedFd, libc::termios)>> = Mutex::new(None);

/// What programs get that ask a terminal of unknown size.
const USUAL: WindowSize = WindowSize { rows: 24, columns: 80 };

/// Raw mode until it is dropped.
pub struct RawMode(());

impl RawMode {
    /// From now on every key goes to who reads standard input.
    pub fn enter() -> io::Result<Self> {
        let fd = io::stdin().as_fd().try_clone_to_owned()?;
        // SAFETY: all zero is a valid termios; the calls fill and read it.
        unsafe {
            let mut mode: libc::termios = std::mem::zeroed();
            check(libc::tcgetattr(fd.as_raw_fd(), &mut mode))?;
            let raw_fd = fd.as_raw_fd();
            let before = mode;
            libc::cfmakeraw(&mut mode);
            // Kept first: a signal between the two must find it.
            *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some((fd, before));
            check(libc::tcsetattr(raw_fd, libc::TCSADRAIN, &mode))?;
        }
        restore_on_panic();
        Ok(Self(()))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back the mode it had. Does nothing if it was not changed.
pub fn restore() {
    // try_lock: a panic while the lock is held must not wait for itself.
    let before = match BEFORE.try_lock() {
        Ok(mut before) => before.take(),
        Err(_) => None,
    };
    if let Some((fd, mode)) = before {
        // SAFETY: the descriptor is ours and the mode is one that the kernel gave.
        unsafe { libc::tcsetattr(fd.as_raw_fd(), libc::TCSADRAIN, &mode) };
    }
}

fn restore_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        restore();
        report(panic);
    }));
}

/// The size of the terminal on standard input, or the usual one.
pub fn size() -> WindowSize {
    // SAFETY: all zero is a valid winsize; the call fills it.
    let (result, size) = unsafe {
        let mut size: libc::winsize = std::mem::zeroed();
        let fd = io::stdin().as_raw_fd();
        (libc::ioctl(fd, libc::TIOCGWINSZ, &mut size), size)
    };
    match result == 0 && size.ws_row > 0 && size.ws_col > 0 {
        true => WindowSize { rows: size.ws_row, columns: size.ws_col },
        false => USUAL,
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
