//! The event loop that owns every virtio device, idle or running, by value.
//!
//! Callers change a device only by a `Command`, one at a time, so nothing here needs a lock. The loop
//! does not know on which thread it is: tests and fuzzers drive it inline, `thread.rs` gives it its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use event_manager::{
    EventManager, EventOps, Events, MutEventSubscriber, SubscriberId, SubscriberOps,
};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::EventFd;

use super::alarm::Alarm;
use super::registry::{DeviceState, DeviceUpdate};
use super::{Activation, QueueConfig, UpdateError, Updated, VirtioDevice, Worker};

/// The least time between a turn and the one that a worker wants next.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// Names a device of one loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceId(usize);

/// What the loop can be asked to do.
pub enum Command {
    /// Take in a device that no driver uses.
    Add(Box<dyn VirtioDevice>),
    /// Turn an idle device into a worker.
    Activate {
        id: DeviceId,
        epoch: u64,
        activation: Box<Activation>,
    },
    /// Turn a worker back into an idle device. An activation of an earlier epoch that arrives later
    /// was overtaken by this reset, and is refused.
    Reset {
        id: DeviceId,
        epoch: u64,
    },
    /// Quiet every worker, and every worker that is activated until `Resume`.
    Quiesce,
    Resume,
    /// Copy out the state of a device; if it runs, only while quiet.
    Save(DeviceId),
    /// Take a device that no driver uses back to a saved state.
    Rewind {
        id: DeviceId,
        state: Box<DeviceState>,
    },
    /// Change a setting of a device, in use or not.
    Update {
        id: DeviceId,
        update: DeviceUpdate,
    },
    /// Stop every worker for good.
    Stop,
}

/// What a command answers.
#[derive(Debug)]
pub enum Reply {
    Done,
    Added(DeviceId),
    Saved(Box<SavedDevice>),
    Updated(Updated),
}

/// A device's part of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedDevice {
    pub state: DeviceState,
    /// Queue positions, if a driver uses the device.
    pub queues: Option<Vec<QueueConfig>>,
    /// Chains that the device has taken and not returned.
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
    // None only while the value moves from one shape to the other.
    shape: Option<Shape>,
}

enum Shape {
    Idle(Box<dyn VirtioDevice>),
    Running(SubscriberId),
}

/// Everything that the loop waits for.
enum Subscriber {
    Worker(Busy),
    Wake(Arc<EventFd>),
}

/// A worker, and when it wants a turn although nothing happens.
struct Busy {
    worker: Box<dyn Worker>,
    wakes_at: Option<Instant>,
    alarm: Alarm,
}

impl Busy {
    fn note_wake(&mut self) {
        if let Some(at) = self.worker.take_wake() {
            // Whoever wanted another turn at once would leave none to the others.
            let at = at.max(Instant::now() + SHORTEST_WAIT);
            self.wakes_at = Some(self.wakes_at.map_or(at, |known| known.min(at)));
            self.alarm.set(at);
        }
    }

    /// Gives it its turn if that is due.
    fn wake(&mut self, now: Instant) {
        match self.wakes_at {
            Some(at) if at <= now => {
                self.wakes_at = None;
                self.worker.wake();
            }
            Some(at) => self.alarm.set(at),
            None => {}
        }
    }
}

/// All virtio devices of a machine, and the descriptors they wait for.
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

    /// Waits up to `timeout_ms`, or for ever if negative, and serves what is ready; returns how many events that was.
    pub fn poll(&mut self, timeout_ms: i32) -> Result<usize, DeviceError> {
        let timeout_ms = match self.wake_due() {
            Some(wait) if timeout_ms < 0 || wait < timeout_ms => wait,
            _ => timeout_ms,
        };
        self.events.run_with_timeout(timeout_ms).map_err(DeviceError::Events)
    }

    /// Gives those their turn whose time has come; returns how many milliseconds the next one has to wait.
    fn wake_due(&mut self) -> Option<i32> {
        if self.alarm.wait()?.is_zero() {
            self.alarm.clear();
            let now = Instant::now();
            self.each_worker(|busy| busy.wake(now));
        }
        // A little late rather than a little early.
        let wait = self.alarm.wait()? + Duration::from_micros(999);
        Some(i32::try_from(wait.as_millis()).unwrap_or(i32::MAX))
    }

    /// Carries out one command.
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
                self.each_worker(|busy| busy.worker.quiesce());
            }
            Command::Resume => {
                self.quiet = false;
                self.each_worker(|busy| busy.worker.resume());
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
        let (worker, alarm) = (device.activate(activation), self.alarm.clone());
        let busy = Busy { worker, wakes_at: None, alarm };
        let subscriber = self.events.add_subscriber(Subscriber::Worker(busy));
        slot.shape = Some(Shape::Running(subscriber));
        if let Ok(Subscriber::Worker(busy)) = self.events.subscriber_mut(subscriber) {
            match self.quiet {
                true => busy.worker.quiesce(),
                // What the driver added before it was ready has no kick of its own.
                false => busy.worker.wake(),
            }
        }
        Ok(())
    }

    fn stop(&mut self, id: DeviceId) -> Result<(), DeviceError> {
        let slot = self.slots.get_mut(id.0).ok_or(DeviceError::Unknown)?;
        if let Some(Shape::Running(subscriber)) = slot.shape {
            let removed = self.events.remove_subscriber(subscriber).map_err(DeviceError::Events)?;
            if let Subscriber::Worker(busy) = removed {
                slot.shape = Some(Shape::Idle(busy.worker.stop().device));
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
                    Subscriber::Worker(busy) => Ok(save_worker(&*busy.worker)),
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
                    Subscriber::Worker(busy) => busy.worker.update(update),
                    Subscriber::Wake(_) => return Err(DeviceError::Unknown),
                }
            }
        };
        updated.map_err(DeviceError::Update)
    }

    fn each_worker(&mut self, mut act: impl FnMut(&mut Busy)) {
        for slot in &self.slots {
            if let Some(Shape::Running(subscriber)) = slot.shape
                && let Ok(Subscriber::Worker(busy)) = self.events.subscriber_mut(subscriber)
            {
                act(busy);
            }
        }
    }
}

fn save_worker(worker: &dyn Worker) -> SavedDevice {
    let queues = worker.queues();
    SavedDevice {
        state: worker.save(),
        queues: Some(queues.iter().map(|queue| queue.save()).collect()),
        in_flight: queues.iter().map(|queue| queue.in_flight()).sum(),
    }
}

impl MutEventSubscriber for Subscriber {
    fn init(&mut self, ops: &mut EventOps) {
        match self {
            Self::Worker(busy) => busy.worker.init(ops),
            Self::Wake(wake) => {
                if let Err(error) = ops.add(Events::new(&**wake, EventSet::IN)) {
                    log::error!("device thread cannot watch its mailbox: {error}");
                }
            }
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match self {
            Self::Worker(busy) => {
                busy.worker.process(events, ops);
                busy.note_wake();
            }
            // Taking the wake-up is all: whoever polls looks into the mailbox next.
            Self::Wake(wake) => {
                let _ = wake.read();
            }
        }
    }
}
