//! Runs the vsock queues: moves packets between rings and multiplexer, and wakes up for nothing else.
//!
//! Every descriptor is watched edge-triggered. What an edge said is kept as a flag until it can be
//! acted upon, so a host socket with data for a guest without buffers, or a hang-up nobody can be told
//! of, costs one wake-up and no spinning; and what arrives while the device is quiet is not lost.

use std::os::fd::AsRawFd;
use std::time::Instant;

use event_manager::{EventOps, Events, MutEventSubscriber};
use vmm_sys_util::epoll::EventSet;

use super::device::{SocketFile, Vsock};
use super::host::UnixHost;
use super::mux::{Limits, MAX_BURST, MIN_BUFFER, Mux, Readiness};
use super::resync::Resync;
use super::state::VsockStateV2;
use crate::GuestMemory;
use crate::virtio::chain::{self, Chain, Segment};
use crate::virtio::registry::DeviceState;
use crate::virtio::{Activation, Interrupt, QueueFault, Stopped, VirtQueue, Worker};

const RX: usize = 0;
const TX: usize = 1;
const EVENT: usize = 2;

// What an event is about. Below these are slots of the multiplexer.
const TOKEN_RX: u32 = u32::MAX - 6;
const TOKEN_TX: u32 = u32::MAX - 5;
const TOKEN_EVENT: u32 = u32::MAX - 4;
const TOKEN_CLIENTS: u32 = u32::MAX - 3;

// What one turn may do before the other devices of the thread get theirs.
const TURN_PACKETS: usize = 256;
const TURN_BYTES: u64 = 1 << 20;

/// A vsock device in use.
pub struct VsockWorker {
    memory: GuestMemory,
    queues: Vec<VirtQueue>,
    interrupt: Interrupt,
    mux: Mux<UnixHost>,
    resync: Resync,
    socket_file: Option<SocketFile>,
    limits: Limits,
    /// When packets have waited long enough for room for their answers.
    stuck_until: Option<Instant>,
    tx_kicked: bool,
    /// When the device went quiet, while it is.
    quiet_since: Option<Instant>,
    failed: bool,
    // Reused from turn to turn.
    chains: Vec<Chain>,
    filled: Vec<u32>,
}

impl VsockWorker {
    pub(super) fn new(device: Vsock, activation: Activation) -> Self {
        let Activation { memory, queues, interrupt, .. } = activation;
        let failed = queues.len() != 3;
        let mut mux = Mux::new(device.guest_cid, device.host, device.next_host_port, device.limits);
        mux.owe(device.owed_resets);
        // Clients may have come before the driver did.
        mux.note_clients();
        Self {
            memory,
            queues,
            interrupt,
            mux,
            resync: if device.out_of_date { Resync::owed() } else { Resync::Done },
            socket_file: device.socket_file,
            limits: device.limits,
            stuck_until: None,
            tx_kicked: true,
            quiet_since: None,
            failed,
            chains: Vec::with_capacity(MAX_BURST),
            filled: Vec::with_capacity(MAX_BURST),
        }
    }

    fn turn(&mut self, now: Instant) -> Result<(), QueueFault> {
        let mut more = self.mux.serve_host(now);
        self.watch_for_stall(now);
        self.resync.advance(now, &mut self.queues[EVENT], &self.memory)?;
        more |= self.serve_tx(now)?;
        if self.resync.allows_rx() {
            more |= self.serve_rx(now)?;
            // Room for resets came back, and with it the packets that waited for it.
            more |= self.tx_kicked && self.mux.can_take_packet();
        }
        let mut interrupt = false;
        for queue in &mut self.queues {
            interrupt |= queue.wants_interrupt()?;
        }
        if interrupt {
            self.interrupt.used_buffers();
        }
        if more {
            self.wake();
        }
        Ok(())
    }

    fn note(&mut self, events: Events) {
        match events.data() {
            TOKEN_TX => self.tx_kicked = true,
            TOKEN_CLIENTS => self.mux.note_clients(),
            // Buffers, events and deadlines are looked at in every turn that needs them.
            TOKEN_RX | TOKEN_EVENT => {}
            slot => {
                let set = events.event_set();
                let readiness = Readiness {
                    read: set.contains(EventSet::IN),
                    ended: set.contains(EventSet::READ_HANG_UP),
                    hung_up: set.intersects(EventSet::HANG_UP | EventSet::ERROR),
                };
                self.mux.note_ready(slot as usize, readiness);
            }
        }
    }

    /// Brings the event loop up to date with which streams there are.
    fn watch(&mut self, ops: &mut EventOps) {
        for stream in self.mux.take_retired() {
            // It was added, so it can be removed; and it must be, before the number is used again.
            let _ = ops.remove(Events::empty(&stream));
        }
        self.mux.rewatch(|slot, stream, known, writable| {
            let mut set = EventSet::IN | EventSet::READ_HANG_UP | EventSet::EDGE_TRIGGERED;
            set.set(EventSet::OUT, writable);
            let events = Events::with_data(stream, slot as u32, set);
            if known { ops.modify(events) } else { ops.add(events) }
        });
    }

    /// Packets wait because the guest does not take the resets it is owed. A guest that also waits for us
    /// would wait for ever, so after a while all sides start anew.
    fn watch_for_stall(&mut self, now: Instant) {
        if self.mux.can_take_packet() {
            self.stuck_until = None;
        } else if *self.stuck_until.get_or_insert(now + self.limits.half_open) <= now {
            self.stuck_until = None;
            self.mux.clear();
            self.resync = Resync::owed();
        }
    }

    /// Takes packets from the guest; true if some are left although nothing hinders.
    fn serve_tx(&mut self, now: Instant) -> Result<bool, QueueFault> {
        if !self.tx_kicked {
            return Ok(false);
        }
        let queue = &mut self.queues[TX];
        queue.disable_kicks()?;
        let mut bytes = 0;
        for _ in 0..TURN_PACKETS {
            if !self.mux.can_take_packet() {
                // Goes on when the guest has taken some of what it is owed; until then kicks stay off.
                return Ok(false);
            }
            if bytes >= TURN_BYTES {
                return Ok(true);
            }
            let Some(chain) = queue.pop()? else {
                if queue.enable_kicks()? {
                    queue.disable_kicks()?;
                    continue;
                }
                self.tx_kicked = false;
                return Ok(false);
            };
            bytes += chain::total_len(chain.readable());
            if !self.mux.take_packet(now, &self.memory, chain.readable()) {
                queue.counters().add_refused();
            }
            queue.push(chain.head(), 0)?;
        }
        Ok(true)
    }

    /// Gives the guest what is for it; true if there is more although it has buffers.
    fn serve_rx(&mut self, now: Instant) -> Result<bool, QueueFault> {
        let queue = &mut self.queues[RX];
        let mut bytes = 0;
        for _ in 0..TURN_PACKETS {
            let wanted = self.mux.buffers_wanted();
            if wanted == 0 {
                return Ok(false);
            }
            if bytes >= TURN_BYTES {
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
            self.mux.fill(now, &self.memory, &buffers, &mut self.filled);
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

/// Pops up to `wanted` usable buffers; false if the guest offers none.
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
            // Only the last one popped can go back to the ring, so this one waits until it comes first.
            queue.undo_pop(chain);
            break;
        }
    }
    Ok(true)
}

/// Returns all but the first `used` chains to the ring, last one first.
fn put_back(queue: &mut VirtQueue, chains: &mut Vec<Chain>, used: usize) {
    for chain in chains.drain(used..).rev() {
        queue.undo_pop(chain);
    }
    chains.clear();
}

impl MutEventSubscriber for VsockWorker {
    fn init(&mut self, ops: &mut EventOps) {
        let edge = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let mut fds = vec![(self.mux.host().listener_fd(), TOKEN_CLIENTS)];
        let kicks = self.queues.iter().map(|queue| queue.kick().as_raw_fd());
        fds.extend(kicks.zip([TOKEN_RX, TOKEN_TX, TOKEN_EVENT]));
        for (fd, token) in fds {
            if let Err(error) = ops.add(Events::with_data_raw(fd, token, edge)) {
                self.failed = true;
                self.interrupt.needs_reset();
                log::error!("vsock: cannot watch its descriptors: {error}");
                return;
            }
        }
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        self.note(events);
        if self.quiet_since.is_some() {
            return;
        }
        if self.failed {
            self.mux.turn_clients_away();
            return;
        }
        let now = Instant::now();
        if let Err(fault) = self.turn(now) {
            self.failed = true;
            self.mux.clear();
            if self.interrupt.needs_reset() {
                log::warn!("vsock: {fault}");
            }
        }
        self.watch(ops);
    }
}

impl Worker for VsockWorker {
    fn quiesce(&mut self) {
        // No chain is held between two turns, so there is nothing to wait for.
        self.quiet_since.get_or_insert_with(Instant::now);
    }

    fn resume(&mut self) {
        let Some(since) = self.quiet_since.take() else { return };
        let pause = since.elapsed();
        self.mux.postpone(pause);
        self.resync.postpone(pause);
        self.stuck_until = self.stuck_until.map(|until| until + pause);
        self.tx_kicked = true;
        self.wake();
    }

    fn save(&self) -> DeviceState {
        DeviceState::VsockV2(VsockStateV2 {
            guest_cid: self.mux.guest_cid(),
            next_host_port: self.mux.next_host_port(),
            owed_resets: self.mux.owed_after_restore(),
            connected: self.mux.has_connections() || !self.resync.allows_rx(),
        })
    }

    fn stop(self: Box<Self>) -> Stopped {
        let Self { queues, mux, socket_file, limits, .. } = *self;
        let guest_cid = mux.guest_cid();
        let (host, next_host_port) = mux.into_parts();
        let device = Box::new(Vsock {
            guest_cid,
            host,
            socket_file,
            next_host_port,
            // The next driver starts without a past.
            owed_resets: Vec::new(),
            out_of_date: false,
            limits,
        });
        Stopped { device, queues }
    }

    fn queues(&self) -> &[VirtQueue] {
        &self.queues
    }

    fn take_wake(&mut self) -> Option<Instant> {
        if self.quiet_since.is_some() || self.failed {
            return None;
        }
        let deadlines = [self.mux.next_deadline(), self.resync.deadline(), self.stuck_until];
        deadlines.into_iter().flatten().min()
    }

    /// By the one queue whose kicks say nothing but that.
    fn wake(&mut self) {
        self.queues.iter().take(RX + 1).for_each(VirtQueue::kick_again);
    }
}
