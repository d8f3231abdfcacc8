//! A virtqueue in use: it hands out checked descriptor chains and takes them back.
//!
//! The ring arithmetic is the virtio-queue crate's. This file adds the checks that contain a
//! hostile driver: a bad ring is a `QueueFault` that stops the device, and no head is in flight
//! twice.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory as _, Permissions};
use vmm_sys_util::eventfd::EventFd;

use super::Counters;
use super::chain::{self, Chain, ChainFault};
use crate::GuestMemory;

/// Layout of the used ring: flags and index, then the entries, then `avail_event`, the index at
/// which the driver shall kick.
const USED_HEADER: u64 = 4;
const USED_ENTRY: u64 = 8;
/// Flag of the used ring: the driver need not kick.
const NO_KICKS: u16 = 1;

/// A queue as the driver configured it, or as a snapshot holds it. Untrusted until
/// `VirtQueue::new`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueConfig {
    pub size: u16,
    pub ready: bool,
    pub desc_table: u64,
    pub avail_ring: u64,
    pub used_ring: u64,
    /// Ring positions: zero for a new queue, the saved ones for a restored queue.
    pub next_avail: u16,
    pub next_used: u16,
}

/// A driver error that ends the use of a queue until the next reset.
#[derive(Debug, thiserror::Error)]
pub enum QueueFault {
    #[error("queue size {size} is not a power of two up to {max}")]
    Size { size: u16, max: u16 },
    #[error("queue is not ready")]
    NotReady,
    #[error("{part} at {address:#x} is misaligned or outside memory")]
    Ring { part: &'static str, address: u64 },
    #[error("ring cannot be read or written")]
    Access(#[source] virtio_queue::Error),
    #[error("descriptor {head} made available twice")]
    Duplicate { head: u16 },
    #[error("descriptor chain is malformed")]
    Chain(#[source] ChainFault),
}

/// A validated queue with its kick, owned by a worker.
pub struct VirtQueue {
    queue: Queue,
    memory: GuestMemory,
    kick: Arc<EventFd>,
    // One bit per head: set from `pop` to `push`.
    in_flight: Vec<u64>,
    // Ring positions of malformed chains that were returned while earlier chains were in flight. An
    // `undo_pop` of an earlier chain moves the position back, and these must then be skipped.
    returned: Vec<u16>,
    // Whether anything was pushed since the driver's request for interrupts was last read.
    pushed: bool,
    counters: Arc<Counters>,
}

impl VirtQueue {
    /// Checks a configuration against guest memory and makes a queue of it.
    pub fn new(
        config: &QueueConfig,
        max_size: u16,
        event_idx: bool,
        memory: GuestMemory,
        kick: Arc<EventFd>,
    ) -> Result<Self, QueueFault> {
        let size = config.size;
        if size == 0 || size > max_size || !size.is_power_of_two() {
            return Err(QueueFault::Size { size, max: max_size });
        }
        if !config.ready {
            return Err(QueueFault::NotReady);
        }
        let (entries, writable) = (u64::from(size), Permissions::ReadWrite);
        check("descriptor table", config.desc_table, 16, 16 * entries, Permissions::Read, &memory)?;
        check("available ring", config.avail_ring, 2, 6 + 2 * entries, Permissions::Read, &memory)?;
        check("used ring", config.used_ring, 4, 6 + 8 * entries, writable, &memory)?;
        let state = virtio_queue::QueueState {
            max_size,
            next_avail: config.next_avail,
            next_used: config.next_used,
            event_idx_enabled: event_idx,
            size,
            ready: true,
            desc_table: config.desc_table,
            avail_ring: config.avail_ring,
            used_ring: config.used_ring,
        };
        let queue = Queue::try_from(state).map_err(QueueFault::Access)?;
        let in_flight = vec![0; usize::from(size).div_ceil(64)];
        let counters = Arc::default();
        let returned = Vec::new();
        Ok(Self { queue, memory, kick, in_flight, returned, pushed: false, counters })
    }

    /// Makes the queue use the device's counters from now on.
    #[must_use]
    pub fn with_counters(mut self, counters: Arc<Counters>) -> Self {
        self.counters = counters;
        self
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the eventfd that the guest's kicks write to. The worker registers it for reading.
    pub fn kick(&self) -> &EventFd {
        &self.kick
    }

    /// Clears the kick, so that the next user of the eventfd gets no event of this one.
    pub fn clear_kick(&self) {
        // An empty counter means that there was no kick.
        let _ = self.kick.read();
    }

    /// Kicks the queue from the host, as `resume` does for chains that arrived while quiesced.
    pub fn kick_again(&self) {
        // Only a counter at its maximum refuses, and then a kick is pending anyway.
        let _ = self.kick.write(1);
    }

    /// Kicks the queue from the host unless it is empty and the driver will kick when it adds a
    /// chain. An idle queue is only read, so that no ring of a fork is written before the fork is
    /// used.
    pub fn kick_if_due(&self) {
        if !self.waits_for_driver().unwrap_or(false) {
            self.kick_again();
        }
    }

    fn waits_for_driver(&self) -> Option<bool> {
        let (next, order) = (self.queue.next_avail(), Ordering::Acquire);
        if self.queue.avail_idx(&self.memory, order).ok()?.0 != next {
            return Some(false);
        }
        let used = GuestAddress(self.queue.used_ring());
        let load = |at| self.memory.load::<u16>(at, Ordering::Relaxed).ok().map(u16::from_le);
        if self.queue.event_idx_enabled() {
            let at = used.checked_add(USED_HEADER + USED_ENTRY * u64::from(self.size()))?;
            Some(load(at)? == next)
        } else {
            Some(load(used)? & NO_KICKS == 0)
        }
    }

    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Takes the next chain that the driver made available. Every field is read once and checked.
    ///
    /// A chain whose buffers are only in the wrong order is an error of the request, not of the
    /// ring: it is returned unused and counted, and the next one is taken. After as many such
    /// chains as the queue has entries this returns `None`, although `enable_kicks` will report
    /// that there are more, so that the caller's bound on work holds.
    pub fn pop(&mut self) -> Result<Option<Chain>, QueueFault> {
        let size = self.queue.size();
        let table = GuestAddress(self.queue.desc_table());
        for _ in 0..size {
            let position = self.queue.next_avail();
            let head = match self.queue.iter(&self.memory).map_err(QueueFault::Access)?.next() {
                Some(chain) => chain.head_index(),
                None => return Ok(None),
            };
            if self.was_returned(position) {
                continue;
            }
            let walked = chain::walk(&self.memory, table, size, head);
            if head < size && self.is_in_flight(head) {
                return Err(QueueFault::Duplicate { head });
            }
            match walked {
                Ok(chain) => {
                    self.set_in_flight(head, true);
                    return Ok(Some(chain.at(position)));
                }
                Err(ChainFault::Order) => {
                    self.counters.add_refused();
                    if self.in_flight() > 0 {
                        self.returned.push(position);
                    }
                    self.push(head, 0)?;
                }
                Err(fault) => return Err(QueueFault::Chain(fault)),
            }
        }
        Ok(None)
    }

    /// Gives the most recently popped chain back to the avail ring, unused: for a receive queue
    /// whose data did not come, or a request that has to wait. Several chains are given back in
    /// reverse order.
    pub fn undo_pop(&mut self, chain: Chain) {
        self.set_in_flight(chain.head(), false);
        self.queue.set_next_avail(chain.position());
    }

    /// Returns a chain to the driver with `len` bytes written to it.
    pub fn push(&mut self, head: u16, len: u32) -> Result<(), QueueFault> {
        self.set_in_flight(head, false);
        self.queue.add_used(&self.memory, head, len).map_err(QueueFault::Access)?;
        self.pushed = true;
        self.counters.add_served();
        Ok(())
    }

    /// Returns whether the driver wants an interrupt for the chains pushed since the last call;
    /// false if none were pushed.
    pub fn wants_interrupt(&mut self) -> Result<bool, QueueFault> {
        if !std::mem::take(&mut self.pushed) {
            return Ok(false);
        }
        self.queue.needs_notification(&self.memory).map_err(QueueFault::Access)
    }

    /// Asks the driver for kicks again. Returns true if the driver has added chains meanwhile,
    /// which must be popped first.
    pub fn enable_kicks(&mut self) -> Result<bool, QueueFault> {
        self.queue.enable_notification(&self.memory).map_err(QueueFault::Access)
    }

    /// Asks the driver not to kick while the worker is popping anyway.
    pub fn disable_kicks(&mut self) -> Result<(), QueueFault> {
        self.queue.disable_notification(&self.memory).map_err(QueueFault::Access)
    }

    /// Returns the number of entries of the ring.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Returns how many chains were popped and not returned.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns whether the next chains include one that was returned already. A saved position
    /// cannot say so, and a restored queue would return that chain again.
    pub fn has_returned_ahead(&self) -> bool {
        let (next, size) = (self.queue.next_avail(), self.queue.size());
        self.returned.iter().any(|position| position.wrapping_sub(next) < size)
    }

    /// Returns positions and addresses, for a snapshot.
    pub fn save(&self) -> QueueConfig {
        QueueConfig {
            size: self.queue.size(),
            ready: true,
            desc_table: self.queue.desc_table(),
            avail_ring: self.queue.avail_ring(),
            used_ring: self.queue.used_ring(),
            next_avail: self.queue.next_avail(),
            next_used: self.queue.next_used(),
        }
    }

    /// Returns whether the chain at `position` was returned already. Forgets positions that no
    /// `undo_pop` can reach.
    fn was_returned(&mut self, position: u16) -> bool {
        if self.returned.is_empty() {
            return false;
        }
        let size = self.queue.size();
        let near = |other: &u16| {
            other.wrapping_sub(position) <= size || position.wrapping_sub(*other) <= size
        };
        self.returned.retain(near);
        self.returned.contains(&position)
    }

    fn is_in_flight(&self, head: u16) -> bool {
        self.in_flight
            .get(usize::from(head / 64))
            .is_some_and(|word| word & (1 << (head % 64)) != 0)
    }

    fn set_in_flight(&mut self, head: u16, flying: bool) {
        if let Some(word) = self.in_flight.get_mut(usize::from(head / 64)) {
            let bit = 1 << (head % 64);
            *word = if flying { *word | bit } else { *word & !bit };
        }
    }
}

fn check(
    part: &'static str,
    address: u64,
    align: u64,
    len: u64,
    access: Permissions,
    memory: &GuestMemory,
) -> Result<(), QueueFault> {
    let inside = memory.check_range(GuestAddress(address), len as usize, access);
    // No driver puts a ring at address zero, and virtio-queue does not accept one there.
    if address == 0 || !address.is_multiple_of(align) || !inside {
        return Err(QueueFault::Ring { part, address });
    }
    Ok(())
}
