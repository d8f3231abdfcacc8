//! Runs the two queues of a network card: wakes up, lets each direction have its turn, tells the driver.
//!
//! The tap is watched edge-triggered, and what an edge said is kept as a flag: a tap with frames for a guest
//! without buffers, or one that is down or gone, costs one wake-up and no spinning.

use std::os::fd::AsRawFd;
use std::time::Instant;

use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use super::super::registry::{DeviceState, DeviceUpdate};
use super::super::{
    Activation, Interrupt, QueueFault, Stopped, UpdateError, Updated, VirtQueue, Worker,
};
use super::device::Net;
use super::mmds::Mmds;
use super::rx::{self, Rx, Turn};
use super::tap;
use super::tx::{self, Sent};
use super::wire::TxOffloads;
use crate::GuestMemory;
use crate::rate_limiter::Cost;

// What an event is about.
const TOKEN_RX: u32 = 0;
const TOKEN_TX: u32 = 1;
const TOKEN_TAP: u32 = 2;

// What one turn sends before the other devices get theirs.
const TURN_FRAMES: usize = 128;
const TURN_BYTES: u64 = 2 << 20;

/// A network card in use.
pub struct NetWorker {
    net: Net,
    memory: GuestMemory,
    queues: Vec<VirtQueue>,
    interrupt: Interrupt,
    rx: Rx,
    offloads: TxOffloads,
    quiet: bool,
    failed: bool,
}

impl NetWorker {
    pub(super) fn new(mut net: Net, activation: Activation) -> Self {
        let Activation { memory, queues, interrupt, features } = activation;
        net.mmds.iter_mut().for_each(Mmds::reset);
        let mut failed = queues.len() != 2;
        if let Err(error) = net.link.set_offload(tap::offload_for(features)) {
            // A tap that is gone has nothing to hand over; one that refuses would hand over the wrong.
            failed |= error.raw_os_error() != Some(libc::EBADFD);
            if net.add_host_error() {
                log::warn!(
                    "net {}: cannot set what the tap may leave undone: {error}",
                    net.link.name()
                );
            }
        }
        // What came before was for another driver, and may have work left undone that this one did not agree to.
        rx::drain(&mut net, &memory);
        if failed {
            interrupt.needs_reset();
        }
        let (rx, offloads) = (Rx::new(features), tx::offloads(features));
        Self { net, memory, queues, interrupt, rx, offloads, quiet: false, failed }
    }

    fn note(&mut self, events: Events) {
        match events.data() {
            TOKEN_RX => self.queues.iter().take(1).for_each(VirtQueue::clear_kick),
            TOKEN_TX => self.queues.iter().skip(1).for_each(VirtQueue::clear_kick),
            TOKEN_TAP => self.rx.readable = true,
            _ => {}
        }
    }

    /// Serves the direction that the event was about. What the guest sent may have been a question that is
    /// answered here, and the answer is received like any other frame.
    fn turn(&mut self, token: u32) -> Result<(), QueueFault> {
        let sends = token == TOKEN_TX;
        if sends {
            self.send_turn()?;
        }
        let now = Instant::now();
        let answers = self.net.mmds.as_mut().is_some_and(|mmds| mmds.is_ready(now));
        if !sends || answers {
            self.receive_turn()?;
        }
        Ok(())
    }

    fn send_turn(&mut self) -> Result<(), QueueFault> {
        let [_, queue] = &mut self.queues[..] else { return Ok(()) };
        if send_frames(&mut self.net, &self.memory, queue, self.offloads)? {
            queue.kick_again();
        }
        if queue.wants_interrupt()? {
            self.interrupt.used_buffers();
        }
        Ok(())
    }

    fn receive_turn(&mut self) -> Result<(), QueueFault> {
        let [queue, _] = &mut self.queues[..] else { return Ok(()) };
        if self.rx.turn(&mut self.net, &self.memory, queue)? == Turn::More {
            queue.kick_again();
        }
        if queue.wants_interrupt()? {
            self.interrupt.used_buffers();
        }
        Ok(())
    }

    fn fail(&mut self, why: &str) {
        self.failed = true;
        if self.interrupt.needs_reset() {
            log::warn!("net {}: {why}", self.net.link.name());
        }
    }
}

/// Sends what the driver offers; true if there is more although nothing hinders.
fn send_frames(
    net: &mut Net,
    memory: &GuestMemory,
    queue: &mut VirtQueue,
    offloads: TxOffloads,
) -> Result<bool, QueueFault> {
    let mut bytes = 0;
    queue.disable_kicks()?;
    for _ in 0..TURN_FRAMES {
        let Some(chain) = queue.pop()? else {
            if queue.enable_kicks()? {
                queue.disable_kicks()?;
                continue;
            }
            return Ok(false);
        };
        let len = tx::frame_len(&chain);
        if !net.tx_limiter.admit(Cost::op(len)) {
            // Goes on when the limiter says so; until then the driver need not kick.
            queue.undo_pop(chain);
            return Ok(false);
        }
        if tx::send(net, memory, &chain, offloads) == Sent::Refused {
            queue.counters().add_refused();
        }
        queue.push(chain.head(), 0)?;
        bytes += len;
        if bytes >= TURN_BYTES {
            break;
        }
    }
    Ok(true)
}

impl MutEventSubscriber for NetWorker {
    fn init(&mut self, ops: &mut EventOps) {
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let mut watched = vec![(self.net.link.fd().as_raw_fd(), TOKEN_TAP, edge)];
        let kicks = self.queues.iter().map(|queue| queue.kick().as_raw_fd());
        watched
            .extend(kicks.zip([TOKEN_RX, TOKEN_TX]).map(|(fd, token)| (fd, token, EventSet::IN)));
        for (fd, token, set) in watched {
            if let Err(error) = ops.add(Events::with_data_raw(fd, token, set)) {
                return self.fail(&format!("cannot watch its descriptors: {error}"));
            }
        }
    }

    fn process(&mut self, events: Events, _ops: &mut EventOps) {
        self.note(events);
        if self.quiet || self.failed {
            return;
        }
        if let Err(fault) = self.turn(events.data()) {
            self.fail(&fault.to_string());
        }
    }
}

impl Worker for NetWorker {
    fn quiesce(&mut self) {
        self.quiet = true;
        // Sending holds nothing between turns; receiving holds buffers, and perhaps half a frame.
        if let Some(queue) = self.queues.first_mut() {
            self.rx.put_back(queue);
        }
    }

    fn resume(&mut self) {
        self.quiet = false;
        let [rx, tx] = &self.queues[..] else { return };
        tx.kick_if_due();
        // Buffers are of no use without a frame.
        if self.rx.readable || self.net.mmds.is_some() {
            rx.kick_again();
        }
    }

    fn save(&self) -> DeviceState {
        DeviceState::NetV2(self.net.state())
    }

    fn stop(self: Box<Self>) -> Stopped {
        Stopped { device: Box::new(self.net), queues: self.queues }
    }

    fn queues(&self) -> &[VirtQueue] {
        &self.queues
    }

    fn take_wake(&mut self) -> Option<Instant> {
        let Net { rx_limiter, tx_limiter, mmds, .. } = &mut self.net;
        let limits = [rx_limiter.take_wake(), tx_limiter.take_wake()];
        let mmds = mmds.as_ref().filter(|_| !self.quiet && !self.failed);
        limits.into_iter().chain([mmds.and_then(Mmds::wakes_at)]).flatten().min()
    }

    fn wake(&mut self) {
        self.queues.iter().for_each(VirtQueue::kick_again);
    }

    fn update(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        let updated = self.net.change(update);
        // Frames that waited for the old limits get their turn.
        self.queues.iter().for_each(VirtQueue::kick_again);
        updated
    }
}
