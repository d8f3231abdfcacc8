//! Standard input as input of the guest's serial console: a terminal in raw mode, or a pipe.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;

use pvmm::Vm;

use crate::sys::terminal::RawMode;

/// The most bytes passed to the guest at a time.
const CHUNK: usize = 1024;

pub struct Keyboard {
    /// `None` at the end of the input, or if standard input is neither a terminal nor a pipe.
    input: Option<File>,
    /// Input that the guest has not taken yet.
    pending: Vec<u8>,
    _raw: Option<RawMode>,
}

impl Keyboard {
    /// Takes over standard input if it is a terminal, a pipe or a socket.
    pub fn attach() -> Self {
        let input = io::stdin().as_fd().try_clone_to_owned().map(File::from).ok();
        let kind = input.as_ref().and_then(|file| file.metadata().ok()).map(|m| m.file_type());
        let piped = kind.is_some_and(|kind| kind.is_fifo() || kind.is_socket());
        let terminal = io::stdin().is_terminal();
        let input = input.filter(|_| piped || terminal);
        // Without raw mode the guest still gets whole lines.
        let raw = if terminal { RawMode::enter().ok() } else { None };
        Self { input, pending: Vec::new(), _raw: raw }
    }

    /// Returns the file descriptor to poll, unless input still waits for room in the guest.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.input.as_ref().filter(|_| self.pending.is_empty()).map(AsFd::as_fd)
    }

    /// Whether input is pending until the guest's serial port has room.
    pub fn waits_for_room(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Reads input, if none is pending, and passes it to the guest. Call it only when input is
    /// readable or the guest has room.
    pub fn pass_on(&mut self, vm: &Vm) {
        if self.pending.is_empty()
            && let Some(input) = &mut self.input
        {
            let mut chunk = [0; CHUNK];
            match input.read(&mut chunk) {
                Ok(count @ 1..) => self.pending.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                _ => self.input = None,
            }
        }
        let taken = vm.type_serial(&self.pending);
        self.pending.drain(..taken);
    }
}
