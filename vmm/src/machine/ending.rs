//! How the machine ended, once it has: set by the first thread that knows, read by the owner.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pvmm_devices::legacy::power::{PowerEvent, PowerSink};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::outcome::{Outcome, Report};
use crate::sys;

/// The outcome of a machine, once it has one.
pub struct Ending {
    outcome: Mutex<Option<Outcome>>,
    event: EventFd,
    then: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Ending {
    pub fn new() -> io::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK)?;
        Ok(Self { outcome: Mutex::new(None), event, then: OnceLock::new() })
    }

    /// Sets what the thread that sees the end does then: nobody should wait for a guest that is no
    /// more.
    pub fn then(&self, act: Box<dyn Fn() + Send + Sync>) {
        // A machine is started once.
        let _ = self.then.set(act);
    }

    fn outcome(&self) -> MutexGuard<'_, Option<Outcome>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machine lives again: it was taken back to before its end.
    pub fn forget(&self) {
        let mut outcome = self.outcome();
        *outcome = None;
        // Nothing was written if the machine had not ended.
        let _ = self.event.read();
    }

    /// For the vCPU threads.
    pub fn report(self: &Arc<Self>) -> Report {
        let ending = self.clone();
        Arc::new(move |outcome| ending.set(outcome))
    }

    /// The machine can no longer go on: an earlier end does not matter any more.
    pub fn end_broken(&self, why: &str) {
        self.forget();
        self.set(Outcome::Broken { why: why.to_owned() });
    }

    pub fn on_power(self: &Arc<Self>) -> PowerSink {
        let ending = self.clone();
        Arc::new(move |event| {
            ending.set(match event {
                PowerEvent::Poweroff => Outcome::Poweroff,
                PowerEvent::Reset => Outcome::Reboot,
            });
        })
    }

    fn set(&self, outcome: Outcome) {
        let mut first = self.outcome();
        if first.is_some() {
            return;
        }
        // Devices of a machine without memory may not answer until its owner lets go of it.
        let answers = outcome != Outcome::MemoryLost;
        *first = Some(outcome);
        // A fresh counter takes a one; and it is only read by `forget`, so it stays readable.
        let _ = self.event.write(1);
        drop(first);
        if let Some(then) = self.then.get().filter(|_| answers) {
            then();
        }
    }

    /// Readable once the machine has ended.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// The outcome, waiting for it up to `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Outcome> {
        if self.outcome().is_none() {
            // If polling itself fails there is nothing to wait with; the caller sees "not yet".
            let _ = sys::wait_readable(&self.event, timeout);
        }
        self.outcome().clone()
    }
}
