//! The virtio-mmio transport of one device: guest loads and stores in, interrupts out.
//!
//! The transport decides nothing about requests. The registers are under one leaf lock and the
//! device is on the device thread; this file connects the two after the lock is released.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::super::counters::CounterValues;
use super::super::registry::{DeviceKind, DeviceUpdate};
use super::super::{
    Activation, DeviceError, DeviceHandle, DeviceId, Interrupt, QueueConfig, QueueFault, VirtQueue,
    VirtioDevice,
};
use super::registers::{Action, RING_EVENT_IDX, Registers, Setup, offset, status};
use super::state::{RestoreError, TransportStateV1};
use crate::GuestMemory;
use crate::bus::BusDevice;
use crate::lines::Line;

/// The size of the guest address range of one transport.
pub const WINDOW_SIZE: u64 = 0x1000;

/// The number of kicks that a queue handles on the vCPU thread before it gets a shortcut. Making
/// one takes longer than a few kicks, and most queues of most machines never see so many.
const KICKS_BEFORE_SHORTCUT: u32 = 8;

/// Connects a guest's kicks to an eventfd without an exit to the vCPU thread.
pub trait KickShortcut: Send + Sync {
    /// Makes a store of `queue` at `QUEUE_NOTIFY` signal `kick` directly from now on.
    fn connect(&self, queue: u32, kick: &EventFd) -> io::Result<()>;
}

/// No shortcut: every kick goes through the vCPU thread.
#[cfg(any(test, feature = "testing"))]
impl KickShortcut for () {
    fn connect(&self, _queue: u32, _kick: &EventFd) -> io::Result<()> {
        Ok(())
    }
}

/// The kicks of one queue.
struct Kicks {
    event: Arc<EventFd>,
    /// Kicks that went through the vCPU thread.
    seen: AtomicU32,
}

/// One virtio device as the guest sees it.
pub struct MmioTransport {
    kind: DeviceKind,
    max_sizes: &'static [u16],
    optional_queues: usize,
    registers: Mutex<Registers>,
    interrupt: Interrupt,
    kicks: Vec<Kicks>,
    shortcut: Box<dyn KickShortcut>,
    memory: GuestMemory,
    thread: DeviceHandle,
    id: DeviceId,
}

impl MmioTransport {
    /// Hands `device` to the device thread and creates its registers.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        thread: DeviceHandle,
        shortcut: Box<dyn KickShortcut>,
        line: Line,
    ) -> io::Result<Self> {
        let (kind, max_sizes) = (device.kind(), device.queue_sizes());
        let optional_queues = device.optional_queues();
        let registers = Registers::new(kind, device.features(), max_sizes, device.config());
        let registers = Mutex::new(registers);
        let interrupt = Interrupt::new(line);
        let kicks = |_: &u16| {
            let event = Arc::new(EventFd::new(EFD_NONBLOCK)?);
            Ok(Kicks { event, seen: AtomicU32::new(0) })
        };
        let kicks = max_sizes.iter().map(kicks).collect::<io::Result<_>>()?;
        let id = thread.add(device).map_err(io::Error::other)?;
        Ok(Self {
            kind,
            max_sizes,
            optional_queues,
            registers,
            interrupt,
            kicks,
            shortcut,
            memory,
            thread,
            id,
        })
    }

    pub fn kind(&self) -> DeviceKind {
        self.kind
    }

    #[cfg(test)]
    pub(crate) fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Returns the eventfd that is written when the guest kicks a queue.
    #[cfg(test)]
    pub(super) fn kick(&self, queue: usize) -> &EventFd {
        &self.kicks[queue].event
    }

    /// Returns the counters of the device and its queues.
    pub fn counters(&self) -> CounterValues {
        self.interrupt.counters().values()
    }

    /// Replaces the configuration space and notifies the driver.
    pub fn set_config(&self, config: Vec<u8>) {
        self.registers().set_config(config);
        self.interrupt.config_changed();
    }

    /// Changes a setting of the device, and notifies the driver if that changed its configuration.
    pub fn update(&self, update: DeviceUpdate) -> Result<(), DeviceError> {
        if let Some(config) = self.thread.update(self.id, update)?.config {
            self.set_config(config);
        }
        Ok(())
    }

    /// Copies out the state of registers, queues and device. The vCPUs must be paused and the
    /// devices quiesced.
    pub fn save(&self) -> Result<TransportStateV1, DeviceError> {
        let saved = self.thread.save(self.id)?;
        // A chain in flight would be lost: the restored worker does not know of it, and the ring no
        // longer offers it. A device that needs a reset is not restored to work, so there it is no
        // loss.
        if saved.in_flight > 0 && !self.interrupt.is_reset_needed() {
            return Err(DeviceError::InFlight { count: saved.in_flight });
        }
        let registers = self.registers();
        let now = registers.negotiation();
        Ok(TransportStateV1 {
            kind: self.kind,
            status: now.status,
            device_features_select: now.device_features_select,
            driver_features_select: now.driver_features_select,
            driver_features: now.driver_features,
            queue_select: now.queue_select,
            config_generation: registers.config_generation(),
            interrupt_status: self.interrupt.status(),
            needs_reset: self.interrupt.is_reset_needed(),
            // A running worker knows the positions; the registers only know where the rings are.
            queues: positions(saved.queues.unwrap_or_default(), &now.queues),
            device: saved.state,
        })
    }

    /// Restores a saved transport, before the guest runs. If a driver was using the device, its
    /// worker starts; quiesce the devices first to hold it until the machine resumes.
    pub fn restore(&self, state: &TransportStateV1) -> Result<(), RestoreError> {
        let (offered, epoch) = {
            let registers = self.registers();
            if registers.negotiation().status != 0 {
                return Err(RestoreError::InUse);
            }
            (registers.offered(), registers.epoch())
        };
        state.check(self.kind, offered, self.kicks.len())?;
        // The queues of a device that needs a reset are not used before that reset.
        if state.is_active() && !state.needs_reset {
            let features = state.driver_features;
            let queues = self
                .build_queues(features, &state.queues)
                .map_err(|(index, source)| RestoreError::Queue { index, source })?;
            let activation = self.activation(features, queues);
            self.thread.activate(self.id, epoch, activation).map_err(RestoreError::Device)?;
        }
        self.registers().restore(state.negotiation(), state.config_generation);
        self.interrupt.restore(state.interrupt_status, state.needs_reset);
        Ok(())
    }

    /// Restores a saved state of a transport in use, for a rollback. The vCPUs must be paused and
    /// the devices quiesced.
    pub fn rewind(&self, state: &TransportStateV1) -> Result<(), RestoreError> {
        self.abandon();
        self.thread.rewind(self.id, state.device.clone()).map_err(RestoreError::Device)?;
        self.restore(state)
    }

    /// Resets the device as its driver would: the worker ends and the registers are in their
    /// power-on state. For a guest that has ended, so that peers connected to it are notified.
    pub fn abandon(&self) {
        let action = self.registers().write(offset::STATUS, 0);
        self.run(action);
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        // A panic while locked would leave plain integers, each valid by itself.
        self.registers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, action: Action) {
        match action {
            Action::Nothing => {}
            Action::Notify(index) => {
                if let Some(kicks) = self.kicks.get(index) {
                    // Only a counter at its maximum refuses, and then a kick is pending anyway.
                    let _ = kicks.event.write(1);
                    self.count_kick(index, kicks);
                }
            }
            Action::Activate(setup) => self.activate(setup),
            Action::Reset { epoch } => self.reset(epoch),
        }
    }

    /// Counts a kick through the vCPU thread, and asks for the shortcut once there were many.
    fn count_kick(&self, index: usize, kicks: &Kicks) {
        if kicks.seen.fetch_add(1, Ordering::Relaxed) == KICKS_BEFORE_SHORTCUT
            && let Err(error) = self.shortcut.connect(index as u32, &kicks.event)
        {
            // Kicks still work through the vCPU thread.
            log::warn!("{}: queue {index}: no kick shortcut: {error}", self.kind.name());
        }
    }

    fn activate(&self, setup: Setup) {
        let queues = match self.build_queues(setup.features, &setup.queues) {
            Ok(queues) => queues,
            Err((index, fault)) => {
                return self.give_up(&format!("queue {index} refused: {fault}"));
            }
        };
        let activation = self.activation(setup.features, queues);
        match self.thread.activate(self.id, setup.epoch, activation) {
            // A reset from another vCPU overtook the activation, and the guest gets that reset.
            Ok(()) | Err(DeviceError::Superseded) => {}
            Err(error) => self.give_up(&format!("activation failed: {error}")),
        }
    }

    fn reset(&self, epoch: u64) {
        if let Err(error) = self.thread.reset(self.id, epoch) {
            // The status stays unchanged, so the driver can tell that the device did not reset.
            return self.give_up(&format!("reset failed: {error}"));
        }
        let mut registers = self.registers();
        if registers.finish_reset(epoch) {
            // Under the lock, so that no vCPU sees the new status with the old interrupt.
            self.interrupt.reset();
        }
    }

    fn build_queues(
        &self,
        features: u64,
        configs: &[QueueConfig],
    ) -> Result<Vec<VirtQueue>, (usize, QueueFault)> {
        let event_idx = features & RING_EVENT_IDX != 0;
        let used = self.queues_in_use(configs);
        let parts = configs.iter().take(used).zip(self.max_sizes).zip(&self.kicks).enumerate();
        let build = |(index, ((config, max), kicks)): (usize, ((&QueueConfig, &u16), &Kicks))| {
            VirtQueue::new(config, *max, event_idx, self.memory.clone(), kicks.event.clone())
                .map(|queue| queue.with_counters(self.interrupt.counters().clone()))
                .map_err(|fault| (index, fault))
        };
        parts.map(build).collect()
    }

    /// Returns the number of queues that the driver uses: all but the optional ones at the end that
    /// it did not make ready.
    fn queues_in_use(&self, configs: &[QueueConfig]) -> usize {
        let needed = configs.len().saturating_sub(self.optional_queues);
        let left = configs.iter().skip(needed).rev().take_while(|config| !config.ready).count();
        configs.len() - left
    }

    fn activation(&self, features: u64, queues: Vec<VirtQueue>) -> Activation {
        let (memory, interrupt) = (self.memory.clone(), self.interrupt.clone());
        Activation { memory, features, queues, interrupt }
    }

    fn give_up(&self, why: &str) {
        if self.interrupt.needs_reset() {
            log::warn!("{}: {why}", self.kind.name());
        }
    }
}

/// Returns the positions that a worker knows, and the register values of the queues that it does
/// not have.
fn positions(mut known: Vec<QueueConfig>, registers: &[QueueConfig]) -> Vec<QueueConfig> {
    known.extend(registers.iter().skip(known.len()));
    known
}

impl BusDevice for MmioTransport {
    fn read(&self, register: u64, data: &mut [u8]) {
        data.fill(0);
        if register >= offset::CONFIG {
            return self.registers().read_config(register - offset::CONFIG, data);
        }
        // Only whole registers can be read, as the specification requires of drivers.
        let Ok(word) = <&mut [u8; 4]>::try_from(data) else { return };
        let value = match register {
            offset::INTERRUPT_STATUS => self.interrupt.status(),
            offset::STATUS => {
                let registers = self.registers();
                let needs_reset =
                    if self.interrupt.is_reset_needed() { status::NEEDS_RESET } else { 0 };
                registers.read(register) | needs_reset
            }
            _ => self.registers().read(register),
        };
        *word = value.to_le_bytes();
    }

    fn write(&self, register: u64, data: &[u8]) {
        // No device has configuration that the guest may write.
        let Ok(word) = <[u8; 4]>::try_from(data) else { return };
        let value = u32::from_le_bytes(word);
        match register {
            offset::CONFIG.. => {}
            offset::INTERRUPT_ACK => self.interrupt.acknowledge(value),
            _ => {
                let action = self.registers().write(register, value);
                self.run(action);
            }
        }
    }
}
