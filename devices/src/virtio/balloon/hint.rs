//! One run of free-page hinting (virtio 1.2 section 5.5.6.6): from the host's request to the
//! guest's end.
//!
//! The guest repeats the command that it answers, then offers free pages, then sends stop. It does
//! not use the pages until the host is done with them.

use std::sync::mpsc::SyncSender;

use super::super::chain::{self, Chain};
use super::config::{HINT_DONE, HINT_STOP};
use super::device::Balloon;
use super::pages;
use crate::GuestMemory;

/// The current run, if there is one.
#[derive(Debug, Default)]
pub struct Hinting {
    /// The guest has repeated the current command and not stopped yet.
    active: bool,
    released: u64,
    waiter: Option<SyncSender<u64>>,
}

impl Hinting {
    /// Begins a run with a command that differs from the last one, or the driver would not notice
    /// it.
    pub fn begin(&mut self, balloon: &mut Balloon, waiter: SyncSender<u64>) {
        balloon.hint_last = balloon.hint_last.wrapping_add(1).max(HINT_DONE + 1);
        balloon.hint_command = balloon.hint_last;
        *self = Self { active: false, released: 0, waiter: Some(waiter) };
    }

    /// Ends the run and lets the guest use the pages again.
    pub fn done(&mut self, balloon: &mut Balloon) {
        balloon.hint_command = HINT_DONE;
        *self = Self::default();
    }

    /// Handles one chain of the guest. Returns false if it is not valid in this state.
    pub fn take(&mut self, balloon: &mut Balloon, memory: &GuestMemory, chain: &Chain) -> bool {
        let mut command = [0; 4];
        if chain::read_at(memory, chain.readable(), 0, &mut command) == command.len() {
            let command = u32::from_le_bytes(command);
            if command == HINT_STOP {
                if std::mem::take(&mut self.active)
                    && let Some(waiter) = self.waiter.take()
                {
                    // The caller may have stopped waiting.
                    let _ = waiter.try_send(self.released);
                }
            } else {
                self.active = command == balloon.hint_command && self.waiter.is_some();
            }
        }
        if chain.writable().is_empty() {
            return !chain.readable().is_empty();
        }
        if self.active {
            self.released += pages::release_buffers(balloon, memory, chain.writable());
        }
        self.active
    }
}
