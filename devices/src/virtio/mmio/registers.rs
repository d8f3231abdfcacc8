//! The register file of one device and the state machine behind its status register.
//!
//! The register file is the only lock that vCPUs share, so it never calls anything: a write returns
//! the `Action` to run once the lock is released.

use super::super::{DeviceKind, QueueConfig};

/// Register offsets, virtio 1.2 section 4.2.2.
pub mod offset {
    pub const MAGIC: u64 = 0x00;
    pub const VERSION: u64 = 0x04;
    pub const DEVICE_ID: u64 = 0x08;
    pub const VENDOR_ID: u64 = 0x0c;
    pub const DEVICE_FEATURES: u64 = 0x10;
    pub const DEVICE_FEATURES_SELECT: u64 = 0x14;
    pub const DRIVER_FEATURES: u64 = 0x20;
    pub const DRIVER_FEATURES_SELECT: u64 = 0x24;
    pub const QUEUE_SELECT: u64 = 0x30;
    pub const QUEUE_SIZE_MAX: u64 = 0x34;
    pub const QUEUE_SIZE: u64 = 0x38;
    pub const QUEUE_READY: u64 = 0x44;
    pub const QUEUE_NOTIFY: u64 = 0x50;
    pub const INTERRUPT_STATUS: u64 = 0x60;
    pub const INTERRUPT_ACK: u64 = 0x64;
    pub const STATUS: u64 = 0x70;
    pub const QUEUE_DESC_LOW: u64 = 0x80;
    pub const QUEUE_DESC_HIGH: u64 = 0x84;
    pub const QUEUE_DRIVER_LOW: u64 = 0x90;
    pub const QUEUE_DRIVER_HIGH: u64 = 0x94;
    pub const QUEUE_DEVICE_LOW: u64 = 0xa0;
    pub const QUEUE_DEVICE_HIGH: u64 = 0xa4;
    pub const SHM_LEN_LOW: u64 = 0xb0;
    pub const SHM_BASE_HIGH: u64 = 0xbc;
    pub const CONFIG_GENERATION: u64 = 0xfc;
    pub const CONFIG: u64 = 0x100;
}

/// Bits of the status register, virtio 1.2 section 2.1.
pub mod status {
    pub const ACKNOWLEDGE: u32 = 1;
    pub const DRIVER: u32 = 2;
    pub const DRIVER_OK: u32 = 4;
    pub const FEATURES_OK: u32 = 8;
    pub const NEEDS_RESET: u32 = 0x40;
    pub const FAILED: u32 = 0x80;
}
use status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FAILED, FEATURES_OK, NEEDS_RESET};

/// Ring features that the transport offers for every device.
pub const RING_INDIRECT_DESC: u64 = 1 << 28;
pub const RING_EVENT_IDX: u64 = 1 << 29;
pub const VERSION_1: u64 = 1 << 32;
pub const TRANSPORT_FEATURES: u64 = RING_INDIRECT_DESC | RING_EVENT_IDX | VERSION_1;

const MAGIC_VALUE: u32 = u32::from_le_bytes(*b"virt");
const VERSION_VALUE: u32 = 2;
const VENDOR_VALUE: u32 = u32::from_le_bytes(*b"pvmm");

/// The action to run once the register file is unlocked.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    Nothing,
    /// Kick a queue that exists.
    Notify(usize),
    /// The driver has set DRIVER_OK: activate the device with these features and queues.
    Activate(Setup),
    /// Stop the device, then call `finish_reset` with this epoch.
    Reset {
        epoch: u64,
    },
}

/// The negotiated features and queues at the time when the driver set DRIVER_OK.
#[derive(Debug, PartialEq, Eq)]
pub struct Setup {
    pub epoch: u64,
    pub features: u64,
    pub queues: Vec<QueueConfig>,
}

/// The registers that a snapshot keeps: all that the driver can change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Negotiation {
    pub status: u32,
    pub device_features_select: u32,
    pub driver_features_select: u32,
    pub driver_features: u64,
    pub queue_select: u32,
    pub queues: Vec<QueueConfig>,
}

/// The registers of one device.
pub struct Registers {
    kind: DeviceKind,
    offered: u64,
    max_sizes: &'static [u16],
    config: Vec<u8>,
    config_generation: u32,
    now: Negotiation,
    // Counts resets, to recognise an activation that was overtaken by a reset.
    epoch: u64,
    // Set from the write of zero until the device has stopped. Meanwhile the status reads as
    // before, and only another reset is accepted.
    resetting: bool,
}

impl Registers {
    pub fn new(
        kind: DeviceKind,
        features: u64,
        max_sizes: &'static [u16],
        config: Vec<u8>,
    ) -> Self {
        let offered = features | TRANSPORT_FEATURES;
        let now = fresh(max_sizes.len());
        let (config_generation, epoch, resetting) = (0, 0, false);
        Self { kind, offered, max_sizes, config, config_generation, now, epoch, resetting }
    }

    pub fn offered(&self) -> u64 {
        self.offered
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    pub fn negotiation(&self) -> &Negotiation {
        &self.now
    }

    pub fn config_generation(&self) -> u32 {
        self.config_generation
    }

    /// Puts saved registers back; the caller has validated them.
    pub fn restore(&mut self, negotiation: Negotiation, config_generation: u32) {
        self.now = negotiation;
        self.config_generation = config_generation;
    }

    /// Replaces the configuration space and counts up its generation, so that a driver that reads
    /// it in parts notices the change.
    pub fn set_config(&mut self, config: Vec<u8>) {
        self.config = config;
        self.config_generation = self.config_generation.wrapping_add(1);
    }

    /// Copies configuration bytes. Past the end `data` keeps the zeros that the caller put there.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.config.len());
        for (to, from) in data.iter_mut().zip(&self.config[start..]) {
            *to = *from;
        }
    }

    /// Reads one register, except the interrupt status, which `Interrupt` holds.
    pub fn read(&self, register: u64) -> u32 {
        let queue = self.selected();
        match register {
            offset::MAGIC => MAGIC_VALUE,
            offset::VERSION => VERSION_VALUE,
            offset::DEVICE_ID => self.kind as u32,
            offset::VENDOR_ID => VENDOR_VALUE,
            offset::DEVICE_FEATURES => page(self.offered, self.now.device_features_select),
            offset::QUEUE_SIZE_MAX => queue.map_or(0, |(index, _)| self.max_size(index).into()),
            offset::QUEUE_READY => queue.map_or(0, |(_, queue)| queue.ready.into()),
            offset::STATUS => self.now.status,
            // No shared memory region exists: length and base read as all ones.
            offset::SHM_LEN_LOW..=offset::SHM_BASE_HIGH if register.is_multiple_of(4) => u32::MAX,
            offset::CONFIG_GENERATION => self.config_generation,
            _ => 0,
        }
    }

    /// Stores to one register, and returns the action to run once the lock is released.
    pub fn write(&mut self, register: u64, value: u32) -> Action {
        if register == offset::STATUS {
            return self.write_status(value);
        }
        if self.resetting {
            return Action::Nothing;
        }
        match register {
            offset::DEVICE_FEATURES_SELECT => self.now.device_features_select = value,
            offset::DRIVER_FEATURES_SELECT => self.now.driver_features_select = value,
            offset::DRIVER_FEATURES => self.write_driver_features(value),
            offset::QUEUE_SELECT => self.now.queue_select = value,
            offset::QUEUE_NOTIFY => return self.notify(value),
            _ => self.write_queue(register, value),
        }
        Action::Nothing
    }

    /// Sets all registers to their power-on state once the device has stopped, unless another reset
    /// has begun. Returns true if `epoch` is that of the current reset.
    pub fn finish_reset(&mut self, epoch: u64) -> bool {
        let current = self.resetting && epoch == self.epoch;
        if current {
            self.now = fresh(self.max_sizes.len());
            self.resetting = false;
        }
        current
    }

    fn write_status(&mut self, value: u32) -> Action {
        if value == 0 {
            self.epoch += 1;
            self.resetting = true;
            return Action::Reset { epoch: self.epoch };
        }
        // Drivers write back what they read, including NEEDS_RESET, which only the device sets.
        let (old, new) = (self.now.status, value & !NEEDS_RESET);
        if self.resetting || old & FAILED != 0 {
            return Action::Nothing;
        }
        let added = new & !old;
        let known = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK | FAILED;
        let in_order = (added & DRIVER == 0 || new & ACKNOWLEDGE != 0)
            && (added & FEATURES_OK == 0 || old & DRIVER != 0)
            && (added & DRIVER_OK == 0 || old & FEATURES_OK != 0);
        if old & !new != 0 || new & !known != 0 || !in_order {
            self.now.status |= FAILED;
            return Action::Nothing;
        }
        if added & FEATURES_OK != 0 && !self.acceptable_features() {
            // The driver reads the status back and finds FEATURES_OK missing: that is the refusal.
            self.now.status = new & !FEATURES_OK;
            return Action::Nothing;
        }
        self.now.status = new;
        if added & DRIVER_OK != 0 && new & FAILED == 0 {
            let (epoch, features) = (self.epoch, self.now.driver_features);
            return Action::Activate(Setup { epoch, features, queues: self.now.queues.clone() });
        }
        Action::Nothing
    }

    fn acceptable_features(&self) -> bool {
        let chosen = self.now.driver_features;
        chosen & !self.offered == 0 && chosen & VERSION_1 != 0
    }

    fn write_driver_features(&mut self, value: u32) {
        if self.now.status & (DRIVER | FEATURES_OK | FAILED) != DRIVER {
            return;
        }
        let (features, value) = (&mut self.now.driver_features, u64::from(value));
        match self.now.driver_features_select {
            0 => *features = *features & !0xffff_ffff | value,
            1 => *features = *features & 0xffff_ffff | value << 32,
            // No feature is offered there; accepting one is recorded as an unoffered feature.
            _ if value != 0 => *features |= !self.offered,
            _ => {}
        }
    }

    fn notify(&self, value: u32) -> Action {
        let running = self.now.status & (DRIVER_OK | FAILED) == DRIVER_OK;
        match usize::try_from(value) {
            Ok(index) if running && index < self.now.queues.len() => Action::Notify(index),
            _ => Action::Nothing,
        }
    }

    fn write_queue(&mut self, register: u64, value: u32) {
        // Queues are set up between FEATURES_OK and DRIVER_OK and frozen afterwards: a running
        // worker relies on the validated configuration.
        let phase = self.now.status & (FEATURES_OK | DRIVER_OK | FAILED);
        let Some((index, _)) = self.selected() else { return };
        let max = self.max_size(index);
        let Some(queue) = self.now.queues.get_mut(index) else { return };
        if phase != FEATURES_OK || (queue.ready && register != offset::QUEUE_READY) {
            return;
        }
        match register {
            offset::QUEUE_SIZE => match u16::try_from(value) {
                Ok(size) if size.is_power_of_two() && size <= max => queue.size = size,
                _ => {}
            },
            offset::QUEUE_READY if value <= 1 => queue.ready = value == 1,
            offset::QUEUE_DESC_LOW => set_low(&mut queue.desc_table, value),
            offset::QUEUE_DESC_HIGH => set_high(&mut queue.desc_table, value),
            offset::QUEUE_DRIVER_LOW => set_low(&mut queue.avail_ring, value),
            offset::QUEUE_DRIVER_HIGH => set_high(&mut queue.avail_ring, value),
            offset::QUEUE_DEVICE_LOW => set_low(&mut queue.used_ring, value),
            offset::QUEUE_DEVICE_HIGH => set_high(&mut queue.used_ring, value),
            _ => {}
        }
    }

    fn selected(&self) -> Option<(usize, &QueueConfig)> {
        let index = usize::try_from(self.now.queue_select).ok()?;
        self.now.queues.get(index).map(|queue| (index, queue))
    }

    fn max_size(&self, index: usize) -> u16 {
        self.max_sizes.get(index).copied().unwrap_or(0)
    }
}

fn fresh(queues: usize) -> Negotiation {
    Negotiation { queues: vec![QueueConfig::default(); queues], ..Negotiation::default() }
}

/// Returns the 32 feature bits that `select` asks for.
fn page(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

fn set_low(address: &mut u64, value: u32) {
    *address = *address & !0xffff_ffff | u64::from(value);
}

fn set_high(address: &mut u64, value: u32) {
    *address = *address & 0xffff_ffff | u64::from(value) << 32;
}
