//! The terminal of this process: its size, and raw mode while a guest's program uses it.
//!
//! Raw mode must never outlive the process, so the previous mode is kept where every way out finds
//! it: the guard's drop, `exit::leave` and the panic hook.
#![allow(unsafe_code)] // tcgetattr, tcsetattr and TIOCGWINSZ.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use pvmm::exec::WindowSize;

/// The terminal that is in raw mode, and its previous mode.
static BEFORE: Mutex<Option<(OwnedFd, libc::termios)>> = Mutex::new(None);

/// The size assumed for a terminal that reports none.
const USUAL: WindowSize = WindowSize { rows: 24, columns: 80 };

/// Keeps the terminal in raw mode until dropped.
pub struct RawMode(());

impl RawMode {
    /// Enters raw mode: every key goes to the reader of standard input.
    pub fn enter() -> io::Result<Self> {
        let fd = io::stdin().as_fd().try_clone_to_owned()?;
        // SAFETY: all zero is a valid termios; the calls fill and read it.
        unsafe {
            let mut mode: libc::termios = std::mem::zeroed();
            check(libc::tcgetattr(fd.as_raw_fd(), &mut mode))?;
            let raw_fd = fd.as_raw_fd();
            let before = mode;
            libc::cfmakeraw(&mut mode);
            // Stored first: a signal between the two steps must find it.
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

/// Restores the terminal's previous mode. Does nothing if it was not changed.
pub fn restore() {
    // try_lock: a panic while the lock is held must not deadlock.
    let before = match BEFORE.try_lock() {
        Ok(mut before) => before.take(),
        Err(_) => None,
    };
    if let Some((fd, mode)) = before {
        // SAFETY: the descriptor is owned and the mode is one that the kernel returned.
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

/// Returns the size of the terminal on standard input, or a default.
pub fn size() -> WindowSize {
    // SAFETY: all zero is a valid winsize; the call fills it.
    let (result, size) = unsafe {
        let mut size: libc::winsize = std::mem::zeroed();
        let fd = io::stdin().as_raw_fd();
        (libc::ioctl(fd, libc::TIOCGWINSZ, &mut size), size)
    };
    if result == 0 && size.ws_row > 0 && size.ws_col > 0 {
        WindowSize { rows: size.ws_row, columns: size.ws_col }
    } else {
        USUAL
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
