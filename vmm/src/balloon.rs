//! The balloon of a machine: how much memory its guest is to give up, and what the guest says about it.
//!
//! The guest decides how fast it follows, or whether it does; every wait here has an end.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use pvmm_devices::virtio::DeviceKind;
use pvmm_devices::virtio::balloon::{BalloonConfig, BalloonStats, BalloonUpdate};
use pvmm_devices::virtio::device_loop::DeviceError;
use pvmm_devices::virtio::registry::DeviceUpdate;

use crate::config::Balloon;
use crate::error::{Error, ErrorKind};
use crate::vm::Vm;

/// A balloon counts in pages of 4 KiB.
const PAGES_PER_MIB: u64 = 256;

/// The device that was asked for, in a machine with so much memory.
pub fn device_config(balloon: Balloon, memory_mib: u64) -> BalloonConfig {
    BalloonConfig {
        limit_pages: to_pages(memory_mib),
        target_pages: to_pages(balloon.target_mib),
        deflate_on_oom: balloon.deflate_on_oom,
        free_page_reporting: balloon.free_page_reporting,
        free_page_hinting: balloon.free_page_hinting,
    }
}

fn to_pages(mib: u64) -> u32 {
    u32::try_from(mib.saturating_mul(PAGES_PER_MIB)).unwrap_or(u32::MAX)
}

/// A search for free pages that is under way, or through.
#[derive(Debug)]
pub struct Hinting {
    answer: Receiver<u64>,
    released: Option<u64>,
}

impl Hinting {
    /// How many bytes were released, once the guest is through.
    pub fn released(&mut self) -> Option<u64> {
        self.released = self.released.or_else(|| self.answer.try_recv().ok());
        self.released
    }
}

impl Vm {
    /// Asks the guest to give up `target_mib`, or to take back what it gave up beyond that. It follows in
    /// its own time: `balloon_stats` says how far it is.
    pub fn set_balloon(&self, target_mib: u64) -> Result<(), Error> {
        self.update_balloon(BalloonUpdate::Target(to_pages(target_mib)))
    }

    /// Asks the guest how its memory is, waiting for an answer up to `timeout`. What it answers is its own
    /// account; only target and actual size are the host's.
    pub fn balloon_stats(&self, timeout: Duration) -> Result<BalloonStats, Error> {
        let (sender, answer) = mpsc::sync_channel(1);
        self.update_balloon(BalloonUpdate::Stats(sender))?;
        wait(&answer, timeout, "statistics")
    }

    /// Asks the guest for its free pages, which are released as it names them; [`Hinting::released`] says when it
    /// is through. [`Self::end_hinting`] must follow: until then the guest does not use those pages.
    pub fn begin_hinting(&self) -> Result<Hinting, Error> {
        let (sender, answer) = mpsc::sync_channel(1);
        self.update_balloon(BalloonUpdate::Hint(sender))?;
        Ok(Hinting { answer, released: None })
    }

    /// The guest may use again what it named.
    pub fn end_hinting(&self) -> Result<(), Error> {
        self.update_balloon(BalloonUpdate::HintDone)
    }

    /// Asks the guest for its free pages and releases them, waiting up to `timeout` until it is through;
    /// returns how many bytes that was. Best while the guest's workload rests: a page that it takes back
    /// at the same moment, for lack of memory, may be lost to it.
    pub fn hint_free_pages(&self, timeout: Duration) -> Result<u64, Error> {
        let hinting = self.begin_hinting()?;
        let released = wait(&hinting.answer, timeout, "free pages");
        // Through or not, the guest may use them again.
        self.end_hinting()?;
        released
    }

    fn update_balloon(&self, update: BalloonUpdate) -> Result<(), Error> {
        let balloon = self.transports.iter().find(|one| one.kind() == DeviceKind::Balloon);
        let Some(transport) = balloon else {
            let act = "balloon: the machine has none";
            return Err(Error::plain(ErrorKind::InvalidConfig, act));
        };
        transport.update(DeviceUpdate::Balloon(update)).map_err(|error| match error {
            DeviceError::Update(cause) => {
                Error::new(ErrorKind::InvalidConfig, "balloon: not possible", cause)
            }
            other => other.into(),
        })
    }
}

fn wait<T>(answer: &Receiver<T>, timeout: Duration, what: &str) -> Result<T, Error> {
    answer.recv_timeout(timeout).map_err(|error| match error {
        RecvTimeoutError::Timeout => {
            let act = format!("balloon: the guest sent no {what} within {timeout:?}");
            Error::plain(ErrorKind::Timeout, act)
        }
        RecvTimeoutError::Disconnected => {
            let act = format!("balloon: its driver was reset, or another asked for {what}");
            Error::plain(ErrorKind::GuestFault, act)
        }
    })
}
