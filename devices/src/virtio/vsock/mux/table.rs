//! The table of connections: slots, the index by ports, deadlines and the shared buffer budget.
//!
//! It knows what exists and what it may cost, not what packets mean. Streams that leave the table are
//! kept in `retired` until the event loop has forgotten their descriptors.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Instant;

use super::Limits;
use crate::virtio::vsock::connection::{Connection, Pair};

/// What a slot's stream is doing.
#[derive(Debug)]
pub enum Stage {
    /// A host client that has not said yet what it wants.
    Client,
    /// A connection of the guest.
    Live(Connection),
    /// The guest is done; bytes for the host are left.
    Draining,
}

/// One stream and what is known of it.
#[derive(Debug)]
pub struct Entry<S> {
    pub stream: S,
    pub stage: Stage,
    /// Bytes from the guest that the host socket did not take yet.
    pub backlog: VecDeque<u8>,
    /// The host will send no more, once what it sent is read.
    pub ended: bool,
    /// The host hung up altogether.
    pub hung_up: bool,
    /// The event loop watches this stream, for room to write too if the second is set.
    pub watched: Option<bool>,
    // Membership flags keep every queue free of duplicates, and so bounded by the table.
    queued: bool,
    touched: bool,
    deadline: Option<Instant>,
    window: u32,
}

impl<S> Entry<S> {
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
    entries: Vec<Option<Entry<S>>>,
    free: Vec<usize>,
    pairs: HashMap<Pair, usize>,
    deadlines: BTreeSet<(Instant, usize)>,
    /// Slots with something for the guest, served in turn.
    ready: VecDeque<usize>,
    /// Slots whose host socket did something.
    touched: VecDeque<usize>,
    /// Slots that the event loop should watch in another way.
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

    /// Adds a stream; the caller has checked `is_full`.
    pub fn insert(&mut self, stream: S, deadline: Instant) -> usize {
        let entry = Entry {
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

    pub fn get(&mut self, slot: usize) -> Option<&mut Entry<S>> {
        self.entries.get_mut(slot)?.as_mut()
    }

    pub fn find(&self, pair: Pair) -> Option<usize> {
        self.pairs.get(&pair).copied()
    }

    /// A receive window for `slot` out of the shared budget: the first hundred connections get a full
    /// one, then each gets a share of what is left, and all get the base.
    pub fn reserve_window(&mut self, slot: usize) -> u32 {
        let extra = (self.full_window - self.base_window).min(self.spare_window / 8);
        let window = self.base_window + extra;
        if let Some(entry) = self.get(slot) {
            entry.window = window;
            self.spare_window -= extra;
        }
        window
    }

    /// Makes a stream the connection of its pair.
    pub fn connect(&mut self, slot: usize, connection: Connection) {
        self.pairs.insert(connection.pair, slot);
        if let Some(entry) = self.get(slot) {
            entry.stage = Stage::Live(connection);
        }
    }

    /// Takes the pair from a connection, which may then be used again; the stream lives on to drain.
    pub fn disconnect(&mut self, slot: usize) {
        let Some(entry) = self.get(slot) else { return };
        if let Stage::Live(connection) = std::mem::replace(&mut entry.stage, Stage::Draining) {
            self.pairs.remove(&connection.pair);
        }
    }

    /// Ends a stream.
    pub fn remove(&mut self, slot: usize) {
        self.disconnect(slot);
        self.set_deadline(slot, None);
        let Some(entry) = self.entries.get_mut(slot).and_then(Option::take) else { return };
        self.spare_window += entry.window.saturating_sub(self.base_window);
        self.free.push(slot);
        // The slot's next owner must not inherit places in line.
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

    /// Ends every stream.
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

    /// A slot whose deadline has passed; the deadline is gone then.
    pub fn next_expired(&mut self, now: Instant) -> Option<usize> {
        let (deadline, slot) = *self.deadlines.first()?;
        if deadline > now {
            return None;
        }
        self.set_deadline(slot, None);
        Some(slot)
    }

    /// Moves all deadlines, for time in which nobody could meet them.
    pub fn postpone(&mut self, by: std::time::Duration) {
        for (deadline, slot) in std::mem::take(&mut self.deadlines) {
            if let Some(entry) = self.get(slot) {
                entry.deadline = Some(deadline + by);
                self.deadlines.insert((deadline + by, slot));
            }
        }
    }

    /// Puts a slot in line for the guest's attention, unless it is there.
    pub fn queue(&mut self, slot: usize) {
        let Some(entry) = self.entries.get_mut(slot).and_then(Option::as_mut) else { return };
        if !std::mem::replace(&mut entry.queued, true) {
            self.ready.push_back(slot);
        }
    }

    /// The slot whose turn it is.
    pub fn first_queued(&self) -> Option<usize> {
        self.ready.front().copied()
    }

    /// Takes the first slot out of the line.
    pub fn unqueue_first(&mut self) {
        if let Some(entry) = self.ready.pop_front().and_then(|slot| self.get(slot)) {
            entry.queued = false;
        }
    }

    /// Notes that the host socket of a slot did something.
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

    /// Asks for another look at how a slot is watched.
    pub fn rewatch(&mut self, slot: usize) {
        self.changed.push(slot);
    }

    pub fn take_changed(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.changed)
    }

    pub fn take_retired(&mut self) -> Vec<S> {
        std::mem::take(&mut self.retired)
    }

    /// The connections, in no order.
    pub fn connections(&self) -> impl Iterator<Item = &Connection> {
        self.entries.iter().flatten().filter_map(|entry| match &entry.stage {
            Stage::Live(connection) => Some(connection),
            _ => None,
        })
    }

    /// Bytes held for the host in all slots.
    pub fn held(&self) -> usize {
        self.entries.iter().flatten().map(|entry| entry.backlog.len()).sum()
    }
}
