//! Runs the two queues of a network card: receives events, serves each direction in turn, notifies
//! the driver.
//!
//! The tap is watched edge-triggered, and each edge is kept as a flag: a tap with frames for a
//! guest without buffers, or one that is down or gone, costs one wake-up and no spinning.

use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

use super::super::registry::{DeviceState, DeviceUpdate};
use super::super::worker::{Budget, Event, Fault, Served};
use super::super::{
    Chain, QueueFault, Rings, UpdateError, Updated, VirtQueue, VirtioDevice, Worker,
};
use super::device::Net;
use super::mmds::Mmds;
use super::rx::{self, Rx, Turn};
use super::tap;
use super::tx::{self, Sent};
use super::wire::TxOffloads;
use crate::rate_limiter::Cost;

const RX: usize = 0;
const TX: usize = 1;

const TX_TURN: Budget = Budget { chains: 128, bytes: 2 << 20 };

/// A network card in use.
pub struct NetWorker {
    net: Net,
    rx: Rx,
    offloads: TxOffloads,
}

impl NetWorker {
    pub(super) fn new(mut net: Net, rings: &mut Rings, features: u64) -> Self {
        net.mmds.iter_mut().for_each(Mmds::reset);
        if let Err(error) = net.link.set_offload(tap::offload_for(features)) {
            let name = format!("net {}", net.link.name());
            let why = format!("cannot set the offloads of the tap: {error}");
            // A tap that is gone delivers nothing; one that refuses would deliver frames that the
            // driver cannot handle.
            if error.raw_os_error() != Some(libc::EBADFD) {
                rings.fail(&name, &why);
            } else if net.add_host_error() {
                log::warn!("{name}: {why}");
            }
        }
        // Frames received earlier were for another driver, and may rely on offloads that this one
        // did not negotiate.
        rx::drain(&mut net, &rings.memory);
        Self { net, rx: Rx::new(features), offloads: tx::offloads(features) }
    }

    fn receive(&mut self, rings: &mut Rings) -> Result<(), Fault> {
        let queue = rings.queues.get_mut(RX).ok_or(QueueFault::NotReady)?;
        if self.rx.turn(&mut self.net, &rings.memory, queue)? == Turn::More {
            queue.kick_again();
        }
        Ok(())
    }
}

impl Worker for NetWorker {
    fn name(&self) -> String {
        format!("net {}", self.net.link.name())
    }

    fn backend_fd(&self) -> Option<RawFd> {
        Some(self.net.link.fd().as_raw_fd())
    }

    fn note(&mut self, event: Event) {
        self.rx.readable |= event == Event::Backend;
    }

    /// Serves the direction of the event. A sent frame may be a request to the metadata service,
    /// whose response is received like any other frame.
    fn turn(&mut self, rings: &mut Rings, event: Event) -> Result<(), Fault> {
        let sends = event == Event::Kick(TX);
        if sends {
            rings.serve_queue(TX, TX_TURN, self)?;
        }
        let now = Instant::now();
        let answers = self.net.mmds.as_mut().is_some_and(|mmds| mmds.is_ready(now));
        if sends && !answers { Ok(()) } else { self.receive(rings) }
    }

    fn serve_chain(
        &mut self,
        _index: usize,
        queue: &mut VirtQueue,
        chain: Chain,
    ) -> Result<Served, Fault> {
        let bytes = tx::frame_len(&chain);
        if !self.net.tx_limiter.admit(Cost::op(bytes)) {
            return Ok(Served::Later(chain));
        }
        if tx::send(&mut self.net, queue.memory(), &chain, self.offloads) == Sent::Refused {
            queue.counters().add_refused();
        }
        queue.push(chain.head(), 0)?;
        Ok(Served::Done { bytes })
    }

    fn quiesce(&mut self, rings: &mut Rings) {
        // Sending holds nothing between turns; receiving holds buffers, and perhaps part of a
        // frame.
        rings.queues.iter_mut().take(RX + 1).for_each(|queue| self.rx.put_back(queue));
    }

    fn resume(&mut self, rings: &Rings) {
        let [rx, tx] = &rings.queues[..] else { return };
        tx.kick_if_due();
        // A receive buffer needs no service before a frame arrives.
        if self.rx.readable || self.net.mmds.is_some() {
            rx.kick_again();
        }
    }

    fn save(&self) -> DeviceState {
        DeviceState::Net(self.net.state())
    }

    fn stop(self: Box<Self>) -> Box<dyn VirtioDevice> {
        Box::new(self.net)
    }

    fn take_wake(&mut self) -> Option<Instant> {
        let Net { rx_limiter, tx_limiter, mmds, .. } = &mut self.net;
        let mmds = mmds.as_ref().and_then(Mmds::wakes_at);
        [rx_limiter.take_wake(), tx_limiter.take_wake(), mmds].into_iter().flatten().min()
    }

    fn update(&mut self, update: DeviceUpdate) -> Result<Updated, UpdateError> {
        self.net.change(update)
    }
}
