//! Defines the trait that every virtio device implements before a driver uses it.
//!
//! A device is one value that changes between two forms: a `VirtioDevice` while it waits for a
//! driver, a `Worker` (`worker.rs`) while the device thread serves its queues, and a `VirtioDevice`
//! again after a reset. A device therefore never has a second owner and needs no lock.
//!
//! ```text
//!              activate                         stop
//! VirtioDevice ────────► Worker (device thread) ────► VirtioDevice
//!                          │  ▲
//!                  quiesce ▼  │ resume
//!                        parked, may be saved
//! ```

use super::registry::{BackendHandle, DeviceKind, DeviceState, DeviceUpdate};
use super::{Interrupt, Rings, VirtQueue, Worker};
use crate::GuestMemory;

/// A device that no driver is using.
pub trait VirtioDevice: Send {
    fn kind(&self) -> DeviceKind;

    /// Returns the device-specific feature bits to offer. The transport adds the ring and version
    /// bits.
    fn features(&self) -> u64;

    /// Returns the maximum size of each queue, in queue order. Each is a power of two.
    fn queue_sizes(&self) -> &'static [u16];

    /// Returns how many of the last queues a driver may leave unused. A queue that the driver has
    /// not made ready is then missing from the activation.
    fn optional_queues(&self) -> usize {
        0
    }

    /// Returns the configuration space as the guest reads it. The transport answers guest reads
    /// from a copy, so that a vCPU never waits for the device thread to read a register.
    fn config(&self) -> Vec<u8>;

    /// Returns what the owner of the machine keeps of the backend.
    fn backend(&self) -> BackendHandle {
        BackendHandle::None
    }

    /// Becomes the worker that serves the queues, once the driver has set DRIVER_OK and agreed on
    /// `features`. Called on the device thread.
    fn activate(self: Box<Self>, rings: &mut Rings, features: u64) -> Box<dyn Worker>;

    /// Returns the state that a snapshot keeps of a device that no driver uses.
    fn save(&self) -> DeviceState;

    /// Restores a state that the device was saved in, and keeps its host backend. A state of
    /// another kind is ignored: the transport compares kinds first.
    fn rewind(&mut self, state: &DeviceState);

    /// Changes a setting of a live device. Called on the device thread, so it must not open files
    /// or block. A device without settings refuses.
    fn update(&mut self, _update: DeviceUpdate) -> Result<Updated, UpdateError> {
        Err(UpdateError::NotOfThisDevice)
    }
}

/// The effect of an update on the guest.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Updated {
    /// The new configuration space, if it changed. The driver is then notified.
    pub config: Option<Vec<u8>>,
}

/// Why a setting was not changed. The device is then unchanged.
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

/// Everything that a device may use once the driver is ready. The transport has validated all of
/// it.
pub struct Activation {
    pub memory: GuestMemory,
    /// The features that device and driver agreed on.
    pub features: u64,
    pub queues: Vec<VirtQueue>,
    pub interrupt: Interrupt,
}
