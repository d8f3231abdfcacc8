//! A virtqueue in use: hands out checked descriptor chains and takes them back.
//!
//! The ring arithmetic is virtio-queue's. What stands here is what a hostile driver must not get past:
//! a bad ring is a `QueueFault` that stops the device, and no head is in flight twice.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory as _, Permissions};
use vmm_sys_util::eventfd::EventFd;

use super::Counters;
use super::chain::{self, Chain, ChainFault};
use crate::GuestMemory;

/// The used ring: flags and index, then entries, then at which index the driver shall kick.
const USED_HEADER: u64 = 4;
const USED_ENTRY: u64 = 8;
/// In its flags: the driver need not kick.
const NO_KICKS: u16 = 1;

/// A queue as the driver configured it, or as a snapshot holds it. Untrusted until `VirtQueue::new`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueConfig {
    pub size: u16,
    pub ready: bool,
    pub desc_table: u64,
    pub avail_ring: u64,
    pub used_ring: u64,
    /// Ring positions: zero for a fresh queue, saved ones for a restored one.
    pub next_avail: u16,
    pub next_used: u16,
}

/// What a driver can do to a queue that ends its use until the next reset.
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
    // Ring positions of malformed chains that went back while chains before them were still out: those
    // may be undone, and then these must not be looked at a second time.
    returned: Vec<u16>,
    // Whether anything was pushed since the driver's wish for interrupts was last read.
    pushed: bool,
    counters: Arc<Counters>,
}

impl VirtQueue {
    /// Checks a configuration against memory and makes it a queue.
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

    /// Counts into the device's own counters from now on.
    #[must_use]
    pub fn with_counters(mut self, counters: Arc<Counters>) -> Self {
        self.counters = counters;
        self
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The descriptor that the guest kicks; to be registered for reading.
    pub fn kick(&self) -> &EventFd {
        &self.kick
    }

    /// Takes the kick, so that the descriptor is no longer readable.
    pub fn clear_kick(&self) {
        // Empty means that somebody else's event was meant; nothing is lost.
        let _ = self.kick.read();
    }

    /// Kicks the queue from the host, as `resume` does for work that arrived while quiet.
    pub fn kick_again(&self) {
        // Only a counter at its maximum refuses, and then a kick is pending anyway.
        let _ = self.kick.write(1);
    }

    /// Kicks the queue from the host unless it stands as a worker left it who waits for the driver: nothing to pop, and
    /// the driver will kick when there is. Such a queue is only read, so that none of a copy's rings is written before
    /// it is used.
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
        match self.queue.event_idx_enabled() {
            true => {
                let at = used.checked_add(USED_HEADER + USED_ENTRY * u64::from(self.size()))?;
                Some(load(at)? == next)
            }
            false => Some(load(used)? & NO_KICKS == 0),
        }
    }

    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The next chain that the driver made available, every field of it read once and checked.
    ///
    /// A chain whose buffers are only in the wrong order is the request's fault, not the ring's: it goes
    /// back unused, is counted, and the next one is looked at. After a queue's worth of those the answer
    /// is `None` although `enable_kicks` will say that there is more, so that the caller's bound on work holds.
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

    /// Gives the most recently popped chain back to the available ring, unused: for a receive queue
    /// whose data did not come, or a request that has to wait. Several go back last one first.
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

    /// Whether the driver wants an interrupt for what was pushed since the last call; false if nothing was.
    pub fn wants_interrupt(&mut self) -> Result<bool, QueueFault> {
        if !std::mem::take(&mut self.pushed) {
            return Ok(false);
        }
        self.queue.needs_notification(&self.memory).map_err(QueueFault::Access)
    }

    /// Asks the driver for kicks again; true if it added chains meanwhile, which must be popped first.
    pub fn enable_kicks(&mut self) -> Result<bool, QueueFault> {
        self.queue.enable_notification(&self.memory).map_err(QueueFault::Access)
    }

    /// Tells the driver not to kick while the worker is busy popping anyway.
    pub fn disable_kicks(&mut self) -> Result<(), QueueFault> {
        self.queue.disable_notification(&self.memory).map_err(QueueFault::Access)
    }

    /// How many entries the ring has.
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// How many chains are out with the worker.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.iter().map(|word| word.count_ones()).sum()
    }

    /// Position and addresses, for a snapshot.
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

    /// Whether what stands at `position` has gone back already. Forgets positions that no undo reaches.
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
    // Zero is where no driver puts a ring and where virtio-queue refuses to look for one.
    if address == 0 || !address.is_multiple_of(align) || !inside {
        return Err(QueueFault::Ring { part, address });
    }
    Ok(())
}
