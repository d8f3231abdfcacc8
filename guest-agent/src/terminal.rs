//! Pseudo-terminals: created, owned, resized.
//!
//! A process with a terminal can edit lines, control jobs and draw on the whole screen.
#![allow(unsafe_code)] // ioctls of the terminal

use std::io::Result;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use pvmm_guest_agent::message::WindowSize;

use crate::sys::{self, check};

/// Opens a new terminal, in the default interactive mode, and returns the agent's side and the
/// process's side. `owner` is the user it belongs to, if not the agent's.
pub fn open(owner: Option<u32>) -> Result<(OwnedFd, OwnedFd)> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_NONBLOCK;
    let ours = sys::open(c"/dev/ptmx", flags, 0)?;
    let unlocked: libc::c_int = 0;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the first call reads one int; the second takes flags and makes a descriptor for the
    // agent, by the terminal itself, so that it does not matter what is mounted on /dev/pts.
    let theirs = unsafe {
        check(libc::ioctl(ours.as_raw_fd(), libc::TIOCSPTLCK, &unlocked))?;
        OwnedFd::from_raw_fd(check(libc::ioctl(ours.as_raw_fd(), libc::TIOCGPTPEER, flags))?)
    };
    // SAFETY: plain data filled by the first call; both descriptors are owned here.
    unsafe {
        let mut mode: libc::termios = std::mem::zeroed();
        check(libc::tcgetattr(theirs.as_raw_fd(), &mut mode))?;
        // Erasing in a line erases characters, not bytes.
        mode.c_iflag |= libc::IUTF8;
        check(libc::tcsetattr(theirs.as_raw_fd(), libc::TCSANOW, &mode))?;
        if let Some(owner) = owner {
            check(libc::fchown(theirs.as_raw_fd(), owner, u32::MAX))?;
        }
    }
    Ok((ours, theirs))
}

/// Sets the size; the kernel notifies the program in the foreground.
pub fn resize(terminal: &OwnedFd, size: WindowSize) -> Result<()> {
    let size =
        libc::winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call reads one winsize.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &size) }).map(drop)
}
