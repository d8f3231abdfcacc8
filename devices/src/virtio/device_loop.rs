//! The event loop that owns every virtio device, idle or running, by value.
//!
//! Callers change a device only by a `Command`, one at a time, so nothing here needs a lock. The
//! loop does not depend on the thread it runs on: tests and fuzzers drive it inline, `thread.rs`
//! gives it a thread of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use event_manager::{
    EventManager, EventOps, Events, MutEventSubscriber, SubscriberId, SubscriberOps,
};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::EventFd;

use super::alarm::Alarm;
use super::registry::{DeviceState, DeviceUpdate};
use super::worker::ActiveDevice;
use super::{Activation, QueueConfig, UpdateError, Updated, VirtioDevice};

/// The shortest time from one run of a worker to its next timed run.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// Identifies a device within one loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(usize);

/// A request to the loop.
pub enum Command {
    /// Takes ownership of a device that no driver uses.
    Add(Box<dyn VirtioDevice>),
    /// Turns an idle device into a worker.
    Activate {
        id: DeviceId,
        epoch: u64,
        activation: Box<Activation>,
    },
    /// Turns a worker back into an idle device. An activation of an earlier epoch that arrives
    /// after this reset is refused.
    Reset {
        id: DeviceId,
        epoch: u64,
    },
    /// Quiesces every worker, including those that are activated before the next `Resume`.
    Quiesce,
    Resume,
    /// Copies out the state of a device. A running device must be quiesced.
    Save(DeviceId),
    /// Restores a saved state of a device that no driver uses.
    Rewind {
        id: DeviceId,
        state: Box<DeviceState>,
    },
    /// Changes a setting of a device, idle or running.
    Update {
        id: DeviceId,
        update: DeviceUpdate,
    },
    /// Stops every worker for good.
    Stop,
}

/// The result of a command.
#[derive(Debug)]
pub enum Reply {
    Done,
    Added(DeviceId),
    Saved(Box<SavedDevice>),
    Updated(Updated),
}

/// The part of a snapshot that one device supplies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedDevice {
    pub state: DeviceState,
    /// Queue positions, if a driver uses the device.
    pub queues: Option<Vec<QueueConfig>>,
    /// Descriptor chains that the device has popped and not returned.
    pub in_flight: u32,
}

/// Why a command was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error("no such device on this thread")]
    Unknown,
    #[error("setting was not changed")]
    Update(#[source] UpdateError),
    #[error("device is already active")]
    AlreadyActive,
    #[error("activation was overtaken by a reset")]
    Superseded,
    #[error("device is not quiet")]
    NotQuiet,
    #[error("device still holds {count} chains of its driver")]
    InFlight { count: u32 },
    #[error("device thread has ended")]
    Gone,
    #[error("device thread has too many calls waiting")]
    Busy,
    #[error("device thread did not answer in {seconds} s")]
    Timeout { seconds: u64 },
    #[error("event loop failed")]
    Events(#[source] event_manager::Error),
}

struct Slot {
    epoch: u64,
    // None only while the device changes from one form to the other.
    shape: Option<Shape>,
}

enum Shape {
    Idle(Box<dyn VirtioDevice>),
    Running(SubscriberId),
}

/// Everything that the loop waits for.
enum Subscriber {
    Device(Busy),
    Wake(Arc<EventFd>),
}

/// A device in use and the time at which it wants to run next even if no event occurs.
struct Busy {
    device: ActiveDevice,
    wakes_at: Option<Instant>,
    alarm: Alarm,
}

impl Busy {
    fn note_wake(&mut self) {
        if let Some(at) = self.device.take_wake() {
            // A worker that always wanted to run again at once would starve the others.
            let at = at.max(Instant::now() + SHORTEST_WAIT);
            self.wakes_at = Some(self.wakes_at.map_or(at, |known| known.min(at)));
            self.alarm.set(at);
        }
    }

    /// Wakes the worker if its time has come.
    fn wake(&mut self, now: Instant) {
        match self.wakes_at {
            Some(at) if at <= now => {
                self.wakes_at = None;
                self.device.wake();
            }
            Some(at) => self.alarm.set(at),
            None => {}
        }
    }
}

/// All virtio devices of a machine, and the file descriptors that they wait for.
pub struct DeviceLoop {
    events: EventManager<Subscriber>,
    slots: Vec<Slot>,
    quiet: bool,
    alarm: Alarm,
}

impl DeviceLoop {
    pub fn new() -> Result<Self, DeviceError> {
        let events = EventManager::new().map_err(DeviceError::Events)?;
        Ok(Self { events, slots: Vec::new(), quiet: false, alarm: Alarm::new() })
    }

    /// Makes `poll` return when `wake` is written.
    pub(super) fn watch(&mut self, wake: Arc<EventFd>) {
        self.events.add_subscriber(Subscriber::Wake(wake));
    }

    /// Waits up to `timeout_ms`, or without limit if it is negative, and serves the events that are
    /// ready. Returns the number of events.
    pub fn poll(&mut self, timeout_ms: i32) -> Result<usize, DeviceError> {
        let timeout_ms = match self.wake_due() {
            Some(wait) if timeout_ms < 0 || wait < timeout_ms => wait,
            _ => timeout_ms,
        };
        self.events.run_with_timeout(timeout_ms).map_err(DeviceError::Events)
    }

    /// Wakes the workers whose time has come. Returns the milliseconds until the next one is due.
    fn wake_due(&mut self) -> Option<i32> {
        if self.alarm.wait()?.is_zero() {
            self.alarm.clear();
            let now = Instant::now();
            self.each_active(|busy| busy.wake(now));
        }
        // Round up: a little late rather than a little early.
        let wait = self.alarm.wait()? + Duration::from_micros(999);
        Some(i32::try_from(wait.as_millis()).unwrap_or(i32::MAX))
    }

    pub fn handle(&mut self, command: Command) -> Result<Reply, DeviceError> {
        match command {
            Command::Add(device) => {
                let id = DeviceId(self.slots.len());
                self.slots.push(Slot { epoch: 0, shape: Some(Shape::Idle(device)) });
                return Ok(Reply::Added(id));
            }
            Command::Activate { id, epoch, activation } => self.activate(id, epoch, *activation)?,
            Command::Reset { id, epoch } => {
                let slot = self.slots.get_mut(id.0).ok_or(DeviceError::Unknown)?;
                slot.epoch = slot.epoch.max(epoch);
                self.stop(id)?;
            }
            Command::Quiesce => {
                self.quiet = true;
                self.each_active(|busy| busy.device.quiesce());
            }
            Command::Resume => {
                self.quiet = false;
                self.each_active(|busy| busy.device.resume());
            }
            Command::Save(id) => return self.save(id).map(|saved| Reply::Saved(Box::new(saved))),
            Command::Rewind { id, state } => {
                let slot = self.slots.get_mut(id.0).ok_or(DeviceError::Unknown)?;
                match slot.shape.as_mut() {
                    Some(Shape::Idle(device)) => device.rewind(&state),
                    _ => return Err(DeviceError::AlreadyActive),
                }
            }
            Command::Update { id, update } => return self.update(id, update).map(Reply::Updated),
            Command::Stop => {
                for index in 0..self.slots.len() {
                    self.stop(DeviceId(index))?;
                }
            }
        }
        Ok(Reply::Done)
    }

    fn activate(
        &mut self,
        id: DeviceId,
        epoch: u64,
        activation: Activation,
    ) -> Result<(), DeviceError> {
        let slot = self.slots.get_mut(id.0).ok_or(DeviceError::Unknown)?;
        if epoch < slot.epoch {
            return Err(DeviceError::Superseded);
        }
        let device = match slot.shape.take() {
            Some(Shape::Idle(device)) => device,
            other => {
                slot.shape = other;
                return Err(DeviceError::AlreadyActive);
            }
        };
        let (device, alarm) = (ActiveDevice::new(device, activation), self.alarm.clone());
        let busy = Busy { device, wakes_at: None, alarm };
        let subscriber = self.events.add_subscriber(Subscriber::Device(busy));
        slot.shape = Some(Shape::Running(subscriber));
        if let Ok(Subscriber::Device(busy)) = self.events.subscriber_mut(subscriber) {
            if self.quiet {
                busy.device.quiesce();
            } else {
                // Chains that the driver added before DRIVER_OK have no kick of their own.
                busy.device.wake();
            }
        }
        Ok(())
    }

    fn stop(&mut self, id: DeviceId) -> Result<(), DeviceError> {
        let slot = self.slots.get_mut(id.0).ok_or(DeviceError::Unknown)?;
        if let Some(Shape::Running(subscriber)) = slot.shape {
            let removed = self.events.remove_subscriber(subscriber).map_err(DeviceError::Events)?;
            if let Subscriber::Device(busy) = removed {
                slot.shape = Some(Shape::Idle(busy.device.stop()));
            }
        }
        Ok(())
    }

    fn save(&mut self, id: DeviceId) -> Result<SavedDevice, DeviceError> {
        match self.slots.get(id.0).and_then(|slot| slot.shape.as_ref()) {
            None => Err(DeviceError::Unknown),
            Some(Shape::Idle(device)) => {
                Ok(SavedDevice { state: device.save(), queues: None, in_flight: 0 })
            }
            Some(Shape::Running(_)) if !self.quiet => Err(DeviceError::NotQuiet),
            Some(Shape::Running(subscriber)) => {
                let subscriber = *subscriber;
                match self.events.subscriber_mut(subscriber).map_err(DeviceError::Events)? {
                    Subscriber::Device(busy) => Ok(busy.device.save()),
                    Subscriber::Wake(_) => Err(DeviceError::Unknown),
                }
            }
        }
    }

    fn update(&mut self, id: DeviceId, update: DeviceUpdate) -> Result<Updated, DeviceError> {
        let updated = match self.slots.get_mut(id.0).and_then(|slot| slot.shape.as_mut()) {
            None => return Err(DeviceError::Unknown),
            Some(Shape::Idle(device)) => device.update(update),
            Some(Shape::Running(subscriber)) => {
                match self.events.subscriber_mut(*subscriber).map_err(DeviceError::Events)? {
                    Subscriber::Device(busy) => busy.device.update(update),
                    Subscriber::Wake(_) => return Err(DeviceError::Unknown),
                }
            }
        };
        updated.map_err(DeviceError::Update)
    }

    fn each_active(&mut self, mut act: impl FnMut(&mut Busy)) {
        for slot in &self.slots {
            if let Some(Shape::Running(subscriber)) = slot.shape
                && let Ok(Subscriber::Device(busy)) = self.events.subscriber_mut(subscriber)
            {
                act(busy);
            }
        }
    }
}

impl MutEventSubscriber for Subscriber {
    fn init(&mut self, ops: &mut EventOps) {
        match self {
            Self::Device(busy) => busy.device.init(ops),
            Self::Wake(wake) => {
                if let Err(error) = ops.add(Events::new(&**wake, EventSet::IN)) {
                    log::error!(
                        "device thread cannot register the event of its call queue: {error}"
                    );
                }
            }
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match self {
            Self::Device(busy) => {
                busy.device.process(events, ops);
                busy.note_wake();
            }
            // Only clears the event: the caller of `poll` reads the call queue next.
            Self::Wake(wake) => {
                let _ = wake.read();
            }
        }
    }
}
