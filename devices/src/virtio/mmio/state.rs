//! The state that a snapshot keeps of a transport, common to all devices.
//!
//! It is plain data that may come from a hostile file: `check` compares it with the device that it
//! is meant for before any of it reaches the registers.

use serde::{Deserialize, Serialize};

use super::super::net;
use super::super::registry::{DeviceKind, DeviceState};
use super::super::{DeviceError, QueueConfig, QueueFault};
use super::registers::status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FAILED, FEATURES_OK};
use super::registers::{Negotiation, VERSION_1};

/// The state of a transport, its queues and its device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportStateV1 {
    pub kind: DeviceKind,
    pub status: u32,
    pub device_features_select: u32,
    pub driver_features_select: u32,
    pub driver_features: u64,
    pub queue_select: u32,
    pub config_generation: u32,
    pub interrupt_status: u32,
    pub needs_reset: bool,
    pub queues: Vec<QueueConfig>,
    pub device: DeviceState,
}

/// Why a saved transport was refused.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error("saved {saved} cannot become a {here}")]
    Kind { saved: &'static str, here: &'static str },
    #[error("saved status {status:#x} is not one a driver can reach")]
    Status { status: u32 },
    #[error("saved features {features:#x} are not among those offered, {offered:#x}")]
    Features { features: u64, offered: u64 },
    #[error(
        "the guest leaves checksums and segmentation to its network card, and a card on a socket \
         cannot do them; restore it on a tap"
    )]
    Offloads,
    #[error("{saved} queues were saved, the device has {here}")]
    QueueCount { saved: usize, here: usize },
    #[error("queue {index} is set up although the driver never got that far")]
    QueueTooEarly { index: usize },
    #[error("queue {index} holds {count} chains, more than its size {size}")]
    Position { index: usize, count: u16, size: u16 },
    #[error("queue {index} is not valid in this memory")]
    Queue {
        index: usize,
        #[source]
        source: QueueFault,
    },
    #[error("device thread refused the saved device")]
    Device(#[source] DeviceError),
    #[error("device is in use already")]
    InUse,
}

impl TransportStateV1 {
    /// Returns whether a driver was using the device.
    pub fn is_active(&self) -> bool {
        self.status & (DRIVER_OK | FAILED) == DRIVER_OK
    }

    pub(super) fn negotiation(&self) -> Negotiation {
        Negotiation {
            status: self.status,
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            driver_features: self.driver_features,
            queue_select: self.queue_select,
            queues: self.queues.clone(),
        }
    }

    /// Refuses a state that the registers of this device cannot have reached.
    pub(super) fn check(
        &self,
        kind: DeviceKind,
        offered: u64,
        queue_count: usize,
    ) -> Result<(), RestoreError> {
        if self.kind != kind || self.device.kind() != kind {
            let saved = if self.kind != kind { self.kind } else { self.device.kind() };
            return Err(RestoreError::Kind { saved: saved.name(), here: kind.name() });
        }
        let status = self.status;
        let (ack, driver) = (ACKNOWLEDGE, ACKNOWLEDGE | DRIVER);
        let agreed = driver | FEATURES_OK;
        let steps = [0, ack, driver, agreed, agreed | DRIVER_OK];
        if !steps.contains(&(status & !FAILED)) {
            return Err(RestoreError::Status { status });
        }
        let features = self.driver_features;
        let past_features = status & FEATURES_OK != 0;
        if past_features && kind == DeviceKind::Net && features & !offered & net::OFFLOADS != 0 {
            return Err(RestoreError::Offloads);
        }
        if past_features && (features & !offered != 0 || features & VERSION_1 == 0) {
            return Err(RestoreError::Features { features, offered });
        }
        if self.queues.len() != queue_count {
            let (saved, here) = (self.queues.len(), queue_count);
            return Err(RestoreError::QueueCount { saved, here });
        }
        for (index, queue) in self.queues.iter().enumerate() {
            if !past_features && *queue != QueueConfig::default() {
                return Err(RestoreError::QueueTooEarly { index });
            }
            let moved = queue.next_avail != 0 || queue.next_used != 0;
            if status & DRIVER_OK == 0 && moved {
                return Err(RestoreError::QueueTooEarly { index });
            }
            let count = queue.next_avail.wrapping_sub(queue.next_used);
            if count > queue.size && !self.needs_reset {
                return Err(RestoreError::Position { index, count, size: queue.size });
            }
        }
        Ok(())
    }
}
