//! Runs the vsock queues: moves packets between rings and multiplexer.
//!
//! Every file descriptor is watched edge-triggered, and each edge is kept as a flag until it is
//! acted upon. A host socket with data for a guest without buffers, or a hang-up that cannot be
//! reported yet, therefore costs one wake-up and no spinning, and events that arrive while the
//! device is quiesced are not lost.

use std::os::fd::RawFd;
use std::time::Instant;

use event_manager::{EventOps, Events};
use vmm_sys_util::epoll::EventSet;

use super::device::{SocketFile, Vsock};
use super::host::UnixHost;
use super::mux::{Limits, MAX_BURST, MIN_BUFFER, Mux, Readiness};
use super::resync::Resync;
use super::state::VsockStateV1;
use crate::virtio::chain::{self, Chain, Segment};
use crate::virtio::registry::DeviceState;
use crate::virtio::worker::{Budget, Drained, Event, Fault, Served};
use crate::virtio::{QueueFault, Rings, VirtQueue, VirtioDevice, Worker};

const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;

/// The limits of one turn in each direction.
const TURN: Budget = Budget { chains: 256, bytes: 1 << 20 };

/// A vsock device in use.
pub struct VsockWorker {
    mux: Mux<UnixHost>,
    resync: Resync,
    socket_file: Option<SocketFile>,
    limits: Limits,
    /// The time of the current turn.
    now: Instant,
    /// When the device stops waiting for the guest to take resets.
    stuck_until: Option<Instant>,
    tx_kicked: bool,
    /// The time at which the device was quiesced, or None while it runs.
    quiet_since: Option<Instant>,
    // Reused between turns.
    chains: Vec<Chain>,
    filled: Vec<u32>,
}

impl VsockWorker {
    pub(super) fn new(device: Vsock) -> Self {
        let mut mux = Mux::new(device.guest_cid, device.host, device.next_host_port, device.limits);
        mux.owe(device.owed_resets);
        // Clients may have connected before the driver was ready.
        mux.note_clients();
        Self {
            mux,
            resync: if device.out_of_date { Resync::owed() } else { Resync::Done },
            socket_file: device.socket_file,
            limits: device.limits,
            now: Instant::now(),
            stuck_until: None,
            tx_kicked: true,
            quiet_since: None,
            chains: Vec::with_capacity(MAX_BURST),
            filled: Vec::with_capacity(MAX_BURST),
        }
    }

    /// Handles a guest that does not take the resets it is owed, so that its packets wait. If the
    /// guest also waits for the device, neither would continue, so after a while all connections
    /// are dropped.
    fn watch_for_stall(&mut self) {
        let now = self.now;
        if self.mux.can_take_packet() {
            self.stuck_until = None;
        } else if *self.stuck_until.get_or_insert(now + self.limits.half_open) <= now {
            self.stuck_until = None;
            self.mux.clear();
            self.resync = Resync::owed();
        }
    }

    /// Delivers packets to the guest. Returns true if there are more and the guest has buffers.
    fn serve_rx(&mut self, rings: &mut Rings) -> Result<bool, Fault> {
        let queue = rings.queues.get_mut(RX).ok_or(QueueFault::NotReady)?;
        let mut bytes = 0;
        for _ in 0..TURN.chains {
            let wanted = self.mux.buffers_wanted();
            if wanted == 0 {
                return Ok(false);
            }
            if bytes >= TURN.bytes {
                return Ok(true);
            }
            if !collect(queue, &mut self.chains, wanted)? {
                if queue.enable_kicks()? {
                    queue.disable_kicks()?;
                    continue;
                }
                return Ok(false);
            }
            let buffers: Vec<&[Segment]> = self.chains.iter().map(Chain::writable).collect();
            self.mux.fill(self.now, &rings.memory, &buffers, &mut self.filled);
            for (chain, len) in self.chains.iter().zip(&self.filled) {
                bytes += u64::from(*len);
                queue.push(chain.head(), *len)?;
            }
            put_back(queue, &mut self.chains, self.filled.len());
            self.filled.clear();
        }
        Ok(true)
    }
}

/// Pops up to `wanted` usable buffers. Returns false if the guest offers none.
fn collect(
    queue: &mut VirtQueue,
    chains: &mut Vec<Chain>,
    wanted: usize,
) -> Result<bool, QueueFault> {
    while chains.len() < wanted {
        let Some(chain) = queue.pop()? else { return Ok(!chains.is_empty()) };
        if chain::total_len(chain.writable()) >= MIN_BUFFER {
            chains.push(chain);
        } else if chains.is_empty() {
            queue.counters().add_refused();
            queue.push(chain.head(), 0)?;
            return Ok(true);
        } else {
            // Only the last popped chain can be given back to the ring, so this one waits until it
            // comes first.
            queue.undo_pop(chain);
            break;
        }
    }
    Ok(true)
}

/// Gives all but the first `used` chains back to the ring, in reverse order.
fn put_back(queue: &mut VirtQueue, chains: &mut Vec<Chain>, used: usize) {
    for chain in chains.drain(used..).rev() {
        queue.undo_pop(chain);
    }
    chains.clear();
}

impl Worker for VsockWorker {
    fn name(&self) -> String {
        "vsock".to_owned()
    }

    fn backend_fd(&self) -> Option<RawFd> {
        Some(self.mux.host().listener_fd())
    }

    fn note(&mut self, event: Event) {
        match event {
            Event::Kick(TX) => self.tx_kicked = true,
            // Buffers, events and deadlines are checked in every turn that needs them.
            Event::Kick(_) => {}
            Event::Backend => self.mux.note_clients(),
            Event::Own { token: slot, set } => {
                let readiness = Readiness {
                    read: set.contains(EventSet::IN),
                    ended: set.contains(EventSet::READ_HANG_UP),
                    hung_up: set.intersects(EventSet::HANG_UP | EventSet::ERROR),
                };
                self.mux.note_ready(slot as usize, readiness);
            }
        }
    }

    fn turn(&mut self, rings: &mut Rings, _event: Event) -> Result<(), Fault> {
        self.now = Instant::now();
        let mut more = self.mux.serve_host(self.now);
        self.watch_for_stall();
        self.resync.advance(self.now, rings.queue(EVENT)?)?;
        let mut tx_kicked_again = false;
        if self.tx_kicked {
            let drained = rings.serve_queue(TX, TURN, self)?;
            self.tx_kicked = drained != Drained::Empty;
            tx_kicked_again = drained == Drained::More;
        }
        if self.resync.allows_rx() {
            more |= self.serve_rx(rings)?;
            // There is room for resets again, so packets that waited for it can be taken.
            more |= self.tx_kicked && self.mux.can_take_packet();
        }
        if more && !tx_kicked_again {
            self.wake(rings);
        }
        Ok(())
    }

    fn watch(&mut self, ops: &mut EventOps) {
        for stream in self.mux.take_retired() {
            // It was added, so it can be removed, and must be before the descriptor number is
            // reused.
            let _ = ops.remove(Events::empty(&stream));
        }
        self.mux.rewatch(|slot, stream, known, writable| {
            let mut set = EventSet::IN | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
            set.set(EventSet::OUT, writable);
            let events = Events::with_data(stream, slot as u32, set);
            if known { ops.modify(events) } else { ops.add(events) }
        });
    }

    /// Packets wait while the guest does not take its resets, and kicks stay disabled.
    fn is_ready(&mut self, _index: usize, _queue: &mut VirtQueue) -> Result<bool, Fault> {
        Ok(self.mux.can_take_packet())
    }

    fn serve_chain(
        &mut self,
        _index: usize,
        queue: &mut VirtQueue,
        chain: Chain,
    ) -> Result<Served, Fault> {
        if !self.mux.take_packet(self.now, queue.memory(), chain.readable()) {
            queue.counters().add_refused();
        }
        queue.push(chain.head(), 0)?;
        Ok(Served::Done { bytes: chain::total_len(chain.readable()) })
    }

    fn abandon(&mut self) {
        self.mux.clear();
        self.mux.turn_clients_away();
    }

    fn quiesce(&mut self, _rings: &mut Rings) {
        // No chain is held between two turns.
        self.quiet_since.get_or_insert_with(Instant::now);
    }

    fn resume(&mut self, rings: &Rings) {
        let Some(since) = self.quiet_since.take() else { return };
        let pause = since.elapsed();
        self.mux.postpone(pause);
        self.resync.postpone(pause);
        self.stuck_until = self.stuck_until.map(|until| until + pause);
        self.tx_kicked = true;
        self.wake(rings);
    }

    fn save(&self) -> DeviceState {
        DeviceState::Vsock(VsockStateV1 {
            guest_cid: self.mux.guest_cid(),
            next_host_port: self.mux.next_host_port(),
            owed_resets: self.mux.owed_after_restore(),
            connected: self.mux.has_connections() || !self.resync.allows_rx(),
        })
    }

    fn stop(self: Box<Self>) -> Box<dyn VirtioDevice> {
        let Self { mux, socket_file, limits, .. } = *self;
        let guest_cid = mux.guest_cid();
        let (host, next_host_port) = mux.into_parts();
        Box::new(Vsock {
            guest_cid,
            host,
            socket_file,
            next_host_port,
            // The next driver starts without old connections.
            owed_resets: Vec::new(),
            out_of_date: false,
            limits,
        })
    }

    fn take_wake(&mut self) -> Option<Instant> {
        let deadlines = [self.mux.next_deadline(), self.resync.deadline(), self.stuck_until];
        deadlines.into_iter().flatten().min()
    }

    /// Kicks the receive queue, whose kicks cause a turn and have no other effect.
    fn wake(&self, rings: &Rings) {
        rings.queues.iter().take(RX + 1).for_each(VirtQueue::kick_again);
    }
}
