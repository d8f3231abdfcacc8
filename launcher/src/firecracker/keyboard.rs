//! Standard input as the guest's serial console: a terminal in raw mode, or what comes through a pipe.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileTypeExt;

use pvmm::Vm;

use crate::sys::terminal::RawMode;

/// What the guest takes at a time.
const CHUNK: usize = 1024;

pub struct Keyboard {
    /// None once there is nothing more to read, or never was.
    input: Option<File>,
    /// What the guest has not taken yet.
    pending: Vec<u8>,
    _raw: Option<RawMode>,
}

impl Keyboard {
    /// Takes standard input over, if somebody may be at the other end.
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

    /// What to wait for: input, while the guest has taken all that came before.
    pub fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.input.as_ref().filter(|_| self.pending.is_empty()).map(AsFd::as_fd)
    }

    /// The guest has room again, and something waits for it.
    pub fn waits_for_room(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Passes on what is there; called only when something is.
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
