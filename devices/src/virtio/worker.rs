//! A device in use: `ActiveDevice` does what all devices do the same way, a `Worker` adds what is
//! its own.
//!
//! `ActiveDevice` registers the events, passes each to the worker for a turn, notifies the driver
//! of used chains, and stops the queues after a fault. A turn is bounded by a `Budget`, so that the
//! other devices are served too.

use std::fmt::Display;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use super::device_loop::SavedDevice;
use super::registry::{DeviceState, DeviceUpdate};
use super::{
    Activation, Chain, Interrupt, QueueFault, UpdateError, Updated, VirtQueue, VirtioDevice,
};
use crate::GuestMemory;

// Event tokens. Lower numbers are a worker's own.
const TOKEN_BACKEND: u32 = u32::MAX;
const TOKEN_FIRST_KICK: u32 = u32::MAX - 64;

/// The part of a worker that is specific to its device. It owns the host backend and runs on the
/// device thread.
///
/// It must never block. An error of the guest is a `Fault`, or an error status in the ring, never a
/// panic.
pub trait Worker: Send {
    /// Returns the name of the device in the log.
    fn name(&self) -> String;

    /// Returns the descriptor of the host that the device waits for.
    fn backend_fd(&self) -> Option<RawFd> {
        None
    }

    /// Records an event, also while the device is quiesced. Events are edge-triggered: each is
    /// reported once.
    fn note(&mut self, _event: Event) {}

    /// Does the work that is due after an event.
    fn turn(&mut self, rings: &mut Rings, event: Event) -> Result<(), Fault>;

    /// Updates which descriptors of its own the event loop watches, after a turn.
    fn watch(&mut self, _ops: &mut EventOps) {}

    /// Returns whether another chain of queue `index` can be served now.
    fn is_ready(&mut self, _index: usize, _queue: &mut VirtQueue) -> Result<bool, Fault> {
        Ok(true)
    }

    /// Serves one chain of queue `index`, for `Rings::serve_queue`.
    fn serve_chain(
        &mut self,
        index: usize,
        queue: &mut VirtQueue,
        chain: Chain,
    ) -> Result<Served, Fault>;

    /// Lets go of what depends on the driver. Called after a fault and at each later event, until
    /// the driver resets the device.
    fn abandon(&mut self) {}

    /// Waits for the requests in flight in the host and returns them to the driver.
    fn finish(&mut self, _rings: &mut Rings) -> Result<(), Fault> {
        Ok(())
    }

    /// Gives chains that are held between turns back to the rings. Until `resume` the worker gets
    /// no turn.
    fn quiesce(&mut self, _rings: &mut Rings) {}

    /// Continues the work, including requests that arrived while the device was quiesced.
    fn resume(&mut self, rings: &Rings) {
        rings.queues.iter().for_each(VirtQueue::kick_if_due);
    }

    /// Returns the state that a snapshot keeps in addition to the queues.
    fn save(&self) -> DeviceState;

    /// Ends the work and returns the idle device. Nothing may write to guest memory after this
    /// returns.
    fn stop(self: Box<Self>) -> Box<dyn VirtioDevice>;

    /// Returns the time at which the worker wants a turn even if no event occurs. It is asked after
    /// each turn; a time is returned only once.
    fn take_wake(&mut self) -> Option<Instant> {
        None
    }

    /// Causes a turn soon.
    fn wake(&self, rings: &Rings) {
        rings.queues.iter().for_each(VirtQueue::kick_again);
    }

    /// Changes a setting, as `VirtioDevice::update` does. No request is in flight in the host.
    fn update(&mut self, _update: DeviceUpdate) -> Result<Updated, UpdateError> {
        Err(UpdateError::NotOfThisDevice)
    }
}

/// The reason for a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The driver or the device itself has kicked a queue.
    Kick(usize),
    /// The descriptor of `Worker::backend_fd` is ready.
    Backend,
    /// A descriptor that the worker registered in `Worker::watch` is ready.
    Own { token: u32, set: EventSet },
}

impl Event {
    fn of(events: Events) -> Self {
        match events.data() {
            TOKEN_BACKEND => Self::Backend,
            kick @ TOKEN_FIRST_KICK.. => Self::Kick((kick - TOKEN_FIRST_KICK) as usize),
            token => Self::Own { token, set: events.event_set() },
        }
    }
}

/// An error that ends the use of a device until the next reset.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error("queue failed: {0}")]
    Queue(#[from] QueueFault),
    #[error("{0}")]
    Request(&'static str),
    #[error("host refused the operations: {0}")]
    Host(#[from] io::Error),
}

/// The limits of one turn of a queue.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    pub chains: usize,
    pub bytes: u64,
}

/// The result of serving a chain.
pub enum Served {
    /// The chain was returned to the driver, or is kept. `bytes` counts against the budget.
    Done { bytes: u64 },
    /// The chain is given back to the ring. The worker causes another turn when it can be served.
    Later(Chain),
}

/// Why a turn of a queue ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// The queue is empty, and the driver will kick when it adds a chain.
    Empty,
    /// The worker cannot serve more for now. The driver need not kick meanwhile.
    Blocked,
    /// The budget is used up, and the queue has been kicked.
    More,
}

/// The driver's side of a device in use: memory, queues and interrupt.
pub struct Rings {
    pub memory: GuestMemory,
    pub queues: Vec<VirtQueue>,
    interrupt: Interrupt,
    failed: bool,
}

impl Rings {
    pub fn queue(&mut self, index: usize) -> Result<&mut VirtQueue, QueueFault> {
        self.queues.get_mut(index).ok_or(QueueFault::NotReady)
    }

    /// Serves the chains of queue `index`, up to the budget.
    pub fn serve_queue<W: Worker>(
        &mut self,
        index: usize,
        budget: Budget,
        worker: &mut W,
    ) -> Result<Drained, Fault> {
        let queue = self.queue(index)?;
        let mut bytes = 0;
        queue.disable_kicks()?;
        for _ in 0..budget.chains {
            if !worker.is_ready(index, queue)? {
                return Ok(Drained::Blocked);
            }
            if bytes >= budget.bytes {
                break;
            }
            match queue.pop()? {
                Some(chain) => match worker.serve_chain(index, queue, chain)? {
                    Served::Done { bytes: served } => bytes += served,
                    Served::Later(chain) => {
                        queue.undo_pop(chain);
                        return Ok(Drained::Blocked);
                    }
                },
                None if queue.enable_kicks()? => queue.disable_kicks()?,
                None => return Ok(Drained::Empty),
            }
        }
        queue.kick_again();
        Ok(Drained::More)
    }

    /// Stops the queues, and asks the driver for a reset.
    pub fn fail(&mut self, name: &str, why: &dyn Display) {
        self.failed = true;
        if self.interrupt.needs_reset() {
            log::warn!("{name}: {why}");
        }
    }

    fn notify_driver(&mut self) -> Result<(), Fault> {
        let mut wanted = false;
        for queue in &mut self.queues {
            wanted |= queue.wants_interrupt()?;
        }
        if wanted {
            self.interrupt.used_buffers();
        }
        Ok(())
    }
}

/// A device while a driver uses it.
pub struct ActiveDevice {
    worker: Box<dyn Worker>,
    rings: Rings,
    quiet: bool,
}

impl ActiveDevice {
    pub fn new(device: Box<dyn VirtioDevice>, activation: Activation) -> Self {
        let Activation { memory, features, queues, interrupt } = activation;
        let mut rings = Rings { memory, queues, interrupt, failed: false };
        let worker = device.activate(&mut rings, features);
        Self { worker, rings, quiet: false }
    }

    /// Finishes or parks the requests in flight. Afterwards the device touches no guest memory and
    /// takes no host input until `resume`.
    pub fn quiesce(&mut self) {
        self.finish();
        self.worker.quiesce(&mut self.rings);
        if self.rings.queues.iter().any(VirtQueue::has_returned_ahead) {
            self.rings.fail(&self.worker.name(), &"malformed chain among those given back");
        }
        self.quiet = true;
    }

    pub fn resume(&mut self) {
        self.quiet = false;
        self.worker.resume(&self.rings);
    }

    /// Returns what a snapshot keeps. The device must be quiesced.
    pub fn save(&self) -> SavedDevice {
        let queues = &self.rings.queues;
        SavedDevice {
            state: self.worker.save(),
            queues: Some(queues.iter().map(VirtQueue::save).collect()),
            in_flight: queues.iter().map(VirtQueue::in_flight).sum(),
        }
    }

    /// Ends the work and returns the idle device.
    pub fn stop(self) -> Box<dyn VirtioDevice> {
        self.rings.queues.iter().for_each(VirtQueue::clear_kick);
        self.worker.stop()
    }

    pub fn take_wake(&mut self) -> Option<Instant> {
        if self.quiet || self.rings.failed { None } else { self.worker.take_wake() }
    }

    pub fn wake(&self) {
        self.worker.wake(&self.rings);
    }

    pub fn update(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        self.finish();
        let updated = self.worker.update(update);
        // Serves requests that waited for the old settings.
        self.wake();
        updated
    }

    fn finish(&mut self) {
        if !self.rings.failed {
            let finished = self.worker.finish(&mut self.rings);
            self.end_turn(finished);
        }
    }

    fn end_turn(&mut self, served: Result<(), Fault>) {
        if let Err(fault) = served.and_then(|()| self.rings.notify_driver()) {
            self.rings.fail(&self.worker.name(), &fault);
        }
    }
}

impl MutEventSubscriber for ActiveDevice {
    fn init(&mut self, ops: &mut EventOps) {
        let kicks = self.rings.queues.iter().map(|queue| queue.kick().as_raw_fd());
        let backend = self.worker.backend_fd().map(|fd| (fd, TOKEN_BACKEND));
        let mut watched = kicks.zip(TOKEN_FIRST_KICK..TOKEN_BACKEND).chain(backend);
        // Edge-triggered, so that no kick has to be read, and one that cannot be served yet causes
        // no spinning.
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let added =
            watched.try_for_each(|(fd, token)| ops.add(Events::with_data_raw(fd, token, edge)));
        if let Err(error) = added {
            let why = format!("cannot register its events: {error}");
            self.rings.fail(&self.worker.name(), &why);
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        let event = Event::of(events);
        self.worker.note(event);
        if self.quiet {
            return;
        }
        if !self.rings.failed {
            let served = self.worker.turn(&mut self.rings, event);
            self.end_turn(served);
        }
        if self.rings.failed {
            self.worker.abandon();
        }
        self.worker.watch(ops);
    }
}
