//! What a virtio device must supply, before and while a driver runs it.
//!
//! A device is one value that changes shape: `VirtioDevice` while it waits for a driver, `Worker`
//! while the device thread runs its queues, and back again on reset. So there is never a second
//! owner, and nothing to lock.
//!
//! ```text
//!              activate                         stop
//! VirtioDevice ────────► Worker (device thread) ────► VirtioDevice
//!                          │  ▲
//!                  quiesce ▼  │ resume
//!                        parked, may be saved
//! ```

use std::time::Instant;

use event_manager::MutEventSubscriber;

use super::registry::{DeviceKind, DeviceState, DeviceUpdate};
use super::{Interrupt, VirtQueue};
use crate::GuestMemory;

/// A device that no driver is using.
pub trait VirtioDevice: Send {
    fn kind(&self) -> DeviceKind;

    /// Device-specific features to offer; the transport adds the ring and version bits.
    fn features(&self) -> u64;

    /// The largest size of each queue, in queue order; each a power of two.
    fn queue_sizes(&self) -> &'static [u16];

    /// How many of the last queues a driver may leave unused. Those that it has not made ready are then
    /// missing from the activation.
    fn optional_queues(&self) -> usize {
        0
    }

    /// The configuration space as the guest reads it. The transport answers guest reads from a copy,
    /// so that a vCPU never waits for the device thread to read a register.
    fn config(&self) -> Vec<u8>;

    /// The driver is ready: become the worker that serves its queues. Called on the device thread.
    fn activate(self: Box<Self>, activation: Activation) -> Box<dyn Worker>;

    /// What a snapshot must keep of a device that no driver uses.
    fn save(&self) -> DeviceState;

    /// Takes the device back to a state that it was saved in, keeping its host backend. A state of another
    /// kind is ignored: the transport compares kinds before.
    fn rewind(&mut self, state: &DeviceState);

    /// Changes what the host may change while the machine lives. Called on the device thread, so it opens
    /// nothing and waits for nothing; a device without settings refuses.
    fn update(&mut self, _update: DeviceUpdate) -> Result<Updated, UpdateError> {
        Err(UpdateError::NotOfThisDevice)
    }
}

/// What the guest must hear of a change.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Updated {
    /// A new configuration space, of which the driver is told.
    pub config: Option<Vec<u8>>,
}

/// Why a setting was not changed; nothing is then different from before.
#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    #[error("this device has no such setting")]
    NotOfThisDevice,
    #[error("{0}")]
    Refused(String),
    #[error("cannot {act}")]
    Host {
        act: &'static str,
        #[source]
        source: std::io::Error,
    },
}

/// Everything a device may use once the driver is ready. All of it was validated by the transport.
pub struct Activation {
    pub memory: GuestMemory,
    /// The features both sides agreed on.
    pub features: u64,
    pub queues: Vec<VirtQueue>,
    pub interrupt: Interrupt,
}

/// A device in use: it owns its queues and its host backend, and lives on the device thread.
///
/// As an event subscriber it registers its queue kicks and host descriptors in `init`, and serves
/// them in `process`; the loop wakes it once it may begin. It must never block, and a guest error ends in `Interrupt::needs_reset` or in
/// an error status in the ring, never in a panic.
pub trait Worker: MutEventSubscriber + Send {
    /// Finishes or parks what is in flight; afterwards the worker touches no guest memory and takes
    /// no host input until `resume`. Its descriptors stay registered: events are ignored or left.
    fn quiesce(&mut self);

    /// Takes up work again, including what arrived while quiet.
    fn resume(&mut self);

    /// What a snapshot must keep, beyond the queues. Only called between `quiesce` and `resume`.
    fn save(&self) -> DeviceState;

    /// Ends the work and gives back the idle device and its queues. Nothing may write to guest memory
    /// or raise an interrupt after this returns.
    fn stop(self: Box<Self>) -> Stopped;

    /// The queues, for the transport to save their positions. Only called between `quiesce` and `resume`.
    fn queues(&self) -> &[VirtQueue];

    /// When it wants a turn although nothing happens: asked after each turn, and told once.
    fn take_wake(&mut self) -> Option<Instant> {
        None
    }

    /// Has itself a turn soon, which `process` then is.
    fn wake(&mut self);

    /// As `VirtioDevice::update`, while a driver uses the device.
    fn update(&mut self, _update: DeviceUpdate) -> Result<Updated, UpdateError> {
        Err(UpdateError::NotOfThisDevice)
    }
}

/// What is left of a worker.
pub struct Stopped {
    pub device: Box<dyn VirtioDevice>,
    pub queues: Vec<VirtQueue>,
}
