//! The balloon of a machine: how much memory its guest is to give up, and what the guest says about
//! it.
//!
//! The guest decides how fast it follows, or whether it does; every wait here has an end.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use pvmm_devices::virtio::DeviceKind;
use pvmm_devices::virtio::balloon::{BalloonStats, BalloonUpdate, pages_of_mib};
use pvmm_devices::virtio::device_loop::DeviceError;
use pvmm_devices::virtio::registry::DeviceUpdate;

use super::Machine;
use crate::error::{Error, ErrorKind};

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

/// Asks the guest to give up `target_mib`, or to take back what it gave up beyond that. It
/// follows in its own time: `balloon_stats` says how far it is.
pub fn set_target(machine: &Machine, target_mib: u64) -> Result<(), Error> {
    update(machine, BalloonUpdate::Target(pages_of_mib(target_mib)))
}

/// Asks the guest how its memory is, waiting for an answer up to `timeout`. What it answers is
/// its own account; only target and actual size are the host's.
pub fn stats(machine: &Machine, timeout: Duration) -> Result<BalloonStats, Error> {
    let (sender, answer) = mpsc::sync_channel(1);
    update(machine, BalloonUpdate::Stats(sender))?;
    wait(&answer, timeout, "statistics")
}

/// Asks the guest for its free pages, which are released as it names them;
/// [`Hinting::released`] says when it is through. [`Self::end_hinting`] must follow: until then
/// the guest does not use those pages.
pub fn begin_hinting(machine: &Machine) -> Result<Hinting, Error> {
    let (sender, answer) = mpsc::sync_channel(1);
    update(machine, BalloonUpdate::Hint(sender))?;
    Ok(Hinting { answer, released: None })
}

/// The guest may use again what it named.
pub fn end_hinting(machine: &Machine) -> Result<(), Error> {
    update(machine, BalloonUpdate::HintDone)
}

/// Asks the guest for its free pages and releases them, waiting up to `timeout` until it is
/// through; returns how many bytes that was. Best while the guest's workload rests: a page that
/// it takes back at the same moment, for lack of memory, may be lost to it.
pub fn hint_free_pages(machine: &Machine, timeout: Duration) -> Result<u64, Error> {
    let hinting = begin_hinting(machine)?;
    let released = wait(&hinting.answer, timeout, "free pages");
    // Through or not, the guest may use them again.
    end_hinting(machine)?;
    released
}

fn update(machine: &Machine, update: BalloonUpdate) -> Result<(), Error> {
    let balloon = machine.transports.iter().find(|one| one.kind() == DeviceKind::Balloon);
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
