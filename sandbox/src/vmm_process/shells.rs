//! Processes that wait for the order of the next VM, so that its start need not wait for them.
//!
//! Each is this program, executed and set up like that of any copy. It ends when its order cannot
//! come any more, because the program that started it is gone.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::copy::Shell;

/// A number of waiting processes.
#[derive(Debug, Default)]
pub struct Shells {
    wanted: usize,
    waiting: Mutex<Vec<Shell>>,
}

impl Shells {
    /// Makes a pool that [`Self::fill`] fills up to `wanted` processes.
    pub fn new(wanted: usize) -> Self {
        Self { wanted, ..Self::default() }
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Shell>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a process that waits, if there is one.
    pub fn take(&self) -> Option<Shell> {
        let mut waiting = self.waiting();
        waiting.retain_mut(Shell::is_waiting);
        waiting.pop()
    }

    /// Returns how many processes wait, and how many should.
    pub fn count(&self) -> (usize, usize) {
        (self.waiting().len(), self.wanted)
    }

    /// Starts processes until there are as many as wanted.
    pub fn fill(&self) -> io::Result<()> {
        while self.waiting().len() < self.wanted {
            let shell = Shell::start()?;
            self.waiting().push(shell);
        }
        Ok(())
    }
}
