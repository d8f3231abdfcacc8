//! The table of connections: slots, the index by ports, deadlines and the shared buffer budget.
//!
//! It holds what exists and what it may cost, and does not interpret packets. Streams that leave
//! the table are kept in `retired` until the event loop has stopped watching them.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Instant;

use super::Limits;
use crate::virtio::vsock::connection::{Connection, Pair};

/// The stage of a slot's stream.
#[derive(Debug)]
pub enum Stage {
    /// A host client that has not sent its request yet.
    Client,
    /// A connection of the guest.
    Live(Connection),
    /// The guest has closed the connection; bytes for the host are left.
    Draining,
}

/// One stream and its state.
#[derive(Debug)]
pub struct ConnectionEntry<S> {
    pub stream: S,
    pub stage: Stage,
    /// Bytes from the guest that the host socket has not accepted yet.
    pub backlog: VecDeque<u8>,
    /// The host will send no more than the bytes still unread.
    pub ended: bool,
    /// The host closed both directions.
    pub hung_up: bool,
    /// Whether the event loop watches this stream, and if so, whether also for room to write.
    pub watched: Option<bool>,
    // These flags keep every queue free of duplicates, and so bounded by the table.
    queued: bool,
    touched: bool,
    deadline: Option<Instant>,
    window: u32,
}

impl<S> ConnectionEntry<S> {
    pub fn has_deadline(&self) -> bool {
        self.deadline.is_some()
    }

    pub fn connection(&mut self) -> Option<&mut Connection> {
        match &mut self.stage {
            Stage::Live(connection) => Some(connection),
            _ => None,
        }
    }
}

/// All streams of a device.
#[derive(Debug)]
pub struct Table<S> {
    entries: Vec<Option<ConnectionEntry<S>>>,
    free: Vec<usize>,
    pairs: HashMap<Pair, usize>,
    deadlines: BTreeSet<(Instant, usize)>,
    /// Slots with packets for the guest, served in turn.
    ready: VecDeque<usize>,
    /// Slots whose host socket had an event.
    touched: VecDeque<usize>,
    /// Slots whose watched events must be updated.
    changed: Vec<usize>,
    retired: Vec<S>,
    capacity: usize,
    base_window: u32,
    full_window: u32,
    spare_window: u32,
}

impl<S> Table<S> {
    pub fn new(limits: &Limits) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            pairs: HashMap::new(),
            deadlines: BTreeSet::new(),
            ready: VecDeque::new(),
            touched: VecDeque::new(),
            changed: Vec::new(),
            retired: Vec::new(),
            capacity: limits.connections,
            base_window: limits.base_window,
            full_window: limits.full_window,
            spare_window: limits.spare_window,
        }
    }

    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub fn is_full(&self) -> bool {
        self.len() >= self.capacity
    }

    /// Adds a stream. The caller has checked `is_full`.
    pub fn insert(&mut self, stream: S, deadline: Instant) -> usize {
        let entry = ConnectionEntry {
            stream,
            stage: Stage::Client,
            backlog: VecDeque::new(),
            ended: false,
            hung_up: false,
            watched: None,
            queued: false,
            touched: false,
            deadline: None,
            window: 0,
        };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.entries[slot] = Some(entry);
                slot
            }
            None => {
                self.entries.push(Some(entry));
                self.entries.len() - 1
            }
        };
        self.set_deadline(slot, Some(deadline));
        self.changed.push(slot);
        slot
    }

    pub fn get(&mut self, slot: usize) -> Option<&mut ConnectionEntry<S>> {
        self.entries.get_mut(slot)?.as_mut()
    }

    pub fn find(&self, pair: Pair) -> Option<usize> {
        self.pairs.get(&pair).copied()
    }

    /// Reserves a receive window for `slot` from the shared budget: the first hundred connections
    /// get a full one, later ones a share of the rest, and all get at least the base.
    pub fn reserve_window(&mut self, slot: usize) -> u32 {
        let extra = (self.full_window - self.base_window).min(self.spare_window / 8);
        let window = self.base_window + extra;
        if let Some(entry) = self.get(slot) {
            entry.window = window;
            self.spare_window -= extra;
        }
        window
    }

    /// Makes a stream the connection of its port pair.
    pub fn connect(&mut self, slot: usize, connection: Connection) {
        self.pairs.insert(connection.pair, slot);
        if let Some(entry) = self.get(slot) {
            entry.stage = Stage::Live(connection);
        }
    }

    /// Frees the port pair of a connection; the stream stays to drain its backlog.
    pub fn disconnect(&mut self, slot: usize) {
        let Some(entry) = self.get(slot) else { return };
        if let Stage::Live(connection) = std::mem::replace(&mut entry.stage, Stage::Draining) {
            self.pairs.remove(&connection.pair);
        }
    }

    pub fn remove(&mut self, slot: usize) {
        self.disconnect(slot);
        self.set_deadline(slot, None);
        let Some(entry) = self.entries.get_mut(slot).and_then(Option::take) else { return };
        self.spare_window += entry.window.saturating_sub(self.base_window);
        self.free.push(slot);
        // The next stream in this slot must not inherit its places in the queues.
        if entry.queued {
            self.ready.retain(|queued| *queued != slot);
        }
        if entry.touched {
            self.touched.retain(|touched| *touched != slot);
        }
        if entry.watched.is_some() {
            self.retired.push(entry.stream);
        }
    }

    pub fn clear(&mut self) {
        for slot in 0..self.entries.len() {
            self.remove(slot);
        }
    }

    pub fn set_deadline(&mut self, slot: usize, deadline: Option<Instant>) {
        let Some(entry) = self.entries.get_mut(slot).and_then(Option::as_mut) else { return };
        if let Some(old) = std::mem::replace(&mut entry.deadline, deadline) {
            self.deadlines.remove(&(old, slot));
        }
        if let Some(new) = deadline {
            self.deadlines.insert((new, slot));
        }
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Returns a slot whose deadline has passed, and clears that deadline.
    pub fn next_expired(&mut self, now: Instant) -> Option<usize> {
        let (deadline, slot) = *self.deadlines.first()?;
        if deadline > now {
            return None;
        }
        self.set_deadline(slot, None);
        Some(slot)
    }

    /// Moves all deadlines by a time in which they could not be met.
    pub fn postpone(&mut self, by: std::time::Duration) {
        for (deadline, slot) in std::mem::take(&mut self.deadlines) {
            if let Some(entry) = self.get(slot) {
                entry.deadline = Some(deadline + by);
                self.deadlines.insert((deadline + by, slot));
            }
        }
    }

    /// Queues a slot to be served to the guest, unless it is queued already.
    pub fn queue(&mut self, slot: usize) {
        let Some(entry) = self.entries.get_mut(slot).and_then(Option::as_mut) else { return };
        if !std::mem::replace(&mut entry.queued, true) {
            self.ready.push_back(slot);
        }
    }

    /// Returns the slot to be served next.
    pub fn first_queued(&self) -> Option<usize> {
        self.ready.front().copied()
    }

    /// Removes the first slot from the queue.
    pub fn unqueue_first(&mut self) {
        if let Some(entry) = self.ready.pop_front().and_then(|slot| self.get(slot)) {
            entry.queued = false;
        }
    }

    /// Records that the host socket of a slot had an event.
    pub fn touch(&mut self, slot: usize) {
        let Some(entry) = self.entries.get_mut(slot).and_then(Option::as_mut) else { return };
        if !std::mem::replace(&mut entry.touched, true) {
            self.touched.push_back(slot);
        }
    }

    pub fn next_touched(&mut self) -> Option<usize> {
        let slot = self.touched.pop_front()?;
        if let Some(entry) = self.get(slot) {
            entry.touched = false;
        }
        Some(slot)
    }

    /// Makes the worker update the watched events of a slot.
    pub fn rewatch(&mut self, slot: usize) {
        self.changed.push(slot);
    }

    pub fn take_changed(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.changed)
    }

    pub fn take_retired(&mut self) -> Vec<S> {
        std::mem::take(&mut self.retired)
    }

    /// Returns the connections, in no particular order.
    pub fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.entries.iter().flatten().filter_map(|entry| match &entry.stage {
            Stage::Live(connection) => Some(connection),
            _ => None,
        })
    }

    /// Returns the number of bytes held for the host in all slots.
    pub fn held(&self) -> usize {
        self.entries.iter().flatten().map(|entry| entry.backlog.len()).sum()
    }
}
