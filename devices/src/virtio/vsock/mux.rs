//! The multiplexer: many host streams over one pair of queues, without queues and without descriptors.
//!
//! The worker feeds it packets, readiness and the time; it decides. `from_guest.rs` is what a packet
//! does, `to_guest.rs` what goes into a receive buffer, `from_host.rs` what host sockets and deadlines
//! do, `table.rs` what exists.

mod from_guest;
mod from_host;
mod table;
mod to_guest;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::connection::Pair;
use super::host::Host;
use super::state::OwedReset;
pub use from_host::Readiness;
use table::Table;
pub use to_guest::{MAX_BURST, MIN_BUFFER};

/// Host ports for clients are taken from here upwards, below the guest's own ephemeral ones.
pub const FIRST_HOST_PORT: u32 = 1 << 30;
/// One past the last port given to a client.
pub const LAST_HOST_PORT: u32 = 1 << 31;

/// Everything that a guest or a host client could otherwise make grow.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Streams in all: clients, connections and those that only drain.
    pub connections: usize,
    /// Resets waiting for receive buffers before no more packets are taken from the guest.
    pub resets: usize,
    /// For a client to say what it wants, for either side to answer, and for a hang-up to be confirmed.
    pub half_open: Duration,
    /// For a host socket to take anything of what a finished connection left.
    pub drain: Duration,
    /// Pause before clients are accepted again after the host ran out of something.
    pub accept_retry: Duration,
    /// The receive window that every connection gets, and the one it gets while there is plenty.
    pub base_window: u32,
    pub full_window: u32,
    /// What all connections together may hold beyond their base windows.
    pub spare_window: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1024,
            resets: 1024,
            half_open: Duration::from_secs(2),
            drain: Duration::from_secs(600),
            accept_retry: Duration::from_millis(100),
            base_window: 32 << 10,
            full_window: 256 << 10,
            spare_window: 32 << 20,
        }
    }
}

/// What happened that should not, since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets without a header, or from or to a wrong address.
    pub dropped: u64,
    /// Packets answered with a reset.
    pub refused: u64,
    /// Connections and clients turned away because the table was full.
    pub capped: u64,
    /// Streams ended by a deadline.
    pub expired: u64,
}

/// All connections of one device.
pub struct Mux<H: Host> {
    guest_cid: u64,
    host: H,
    table: Table<H::Stream>,
    limits: Limits,
    next_host_port: u32,
    /// Resets for ports without a connection.
    resets: VecDeque<OwedReset>,
    clients_waiting: bool,
    accept_again: Option<Instant>,
    counts: Counts,
    // Bytes on their way from guest memory into a backlog.
    scratch: Vec<u8>,
}

impl<H: Host> Mux<H> {
    pub fn new(guest_cid: u64, host: H, next_host_port: u32, limits: Limits) -> Self {
        Self {
            guest_cid,
            host,
            table: Table::new(&limits),
            limits,
            next_host_port,
            resets: VecDeque::new(),
            clients_waiting: false,
            accept_again: None,
            counts: Counts::default(),
            scratch: Vec::new(),
        }
    }

    pub fn guest_cid(&self) -> u64 {
        self.guest_cid
    }

    pub fn host(&self) -> &H {
        &self.host
    }

    /// The host side and the next port for a client, when nobody needs connections any more.
    pub fn into_parts(self) -> (H, u32) {
        (self.host, self.next_host_port)
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// How many streams there are.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes held for host sockets in all connections.
    pub fn held(&self) -> usize {
        self.table.held()
    }

    /// Ends every stream and forgets what was owed to the guest.
    pub fn clear(&mut self) {
        self.table.clear();
        self.resets.clear();
    }

    /// When something must be done even if nothing happens.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.table.next_deadline().into_iter().chain(self.accept_again).min()
    }

    /// Makes up for time in which the guest could not answer.
    pub fn postpone(&mut self, by: Duration) {
        self.table.postpone(by);
    }

    pub fn next_host_port(&self) -> u32 {
        self.next_host_port
    }

    /// Whether the guest may believe itself connected to anything.
    pub fn has_connections(&self) -> bool {
        self.table.connections().next().is_some()
    }

    /// The connections that a restored guest would wait for in vain, for a transport reset only reaches
    /// those that it believes established.
    pub fn owed_after_restore(&self) -> Vec<OwedReset> {
        let half_open =
            self.table.connections().filter(|c| c.phase == super::connection::Phase::Accepting);
        let half_open = half_open.map(|connection| OwedReset::stream(connection.pair));
        self.resets.iter().copied().chain(half_open).collect()
    }

    /// Takes over what a saved device owed.
    pub fn owe(&mut self, resets: impl IntoIterator<Item = OwedReset>) {
        self.resets.extend(resets);
    }

    /// Streams whose descriptors the event loop must forget before they close.
    pub fn take_retired(&mut self) -> Vec<H::Stream> {
        self.table.take_retired()
    }

    /// Calls `watch` for each stream that is to be watched anew or differently: with its slot, itself, and
    /// whether room to write matters; an error ends the stream.
    pub fn rewatch<E>(
        &mut self,
        mut watch: impl FnMut(usize, &H::Stream, bool, bool) -> Result<(), E>,
    ) {
        for slot in self.table.take_changed() {
            let Some(entry) = self.table.get(slot) else { continue };
            let writable = !entry.backlog.is_empty();
            if entry.watched == Some(writable) {
                continue;
            }
            let known = entry.watched.is_some();
            match watch(slot, &entry.stream, known, writable) {
                Ok(()) => entry.watched = Some(writable),
                Err(_) => self.abort(slot),
            }
        }
    }

    /// Ends a connection from this side; the guest hears of it if it knew of it.
    fn abort(&mut self, slot: usize) {
        let Some(entry) = self.table.get(slot) else { return };
        let known = entry.connection().filter(|connection| connection.is_known_to_guest());
        let pair = known.map(|connection| connection.pair);
        self.table.remove(slot);
        if let Some(pair) = pair {
            self.resets.push_back(OwedReset::stream(pair));
        }
    }

    /// A host port that makes a pair with `guest_port` which is not in use.
    fn allocate_pair(&mut self, guest_port: u32) -> Pair {
        loop {
            let host_port = self.next_host_port;
            self.next_host_port = match host_port + 1 {
                LAST_HOST_PORT => FIRST_HOST_PORT,
                next => next,
            };
            let pair = Pair { host_port, guest_port };
            // There are far more ports than slots, so this ends.
            if self.table.find(pair).is_none() {
                return pair;
            }
        }
    }
}

/// What tests look at to see that nothing is left lying.
#[cfg(any(test, feature = "testing"))]
impl<H: Host> Mux<H> {
    pub fn host_mut(&mut self) -> &mut H {
        &mut self.host
    }

    pub fn knows(&self, pair: Pair) -> bool {
        self.table.find(pair).is_some()
    }

    /// Connections whose host socket has bytes that the guest could take.
    pub fn unread_pairs(&self) -> Vec<Pair> {
        let unread = self.table.connections().filter(|connection| connection.has_unread());
        unread.map(|connection| connection.pair).collect()
    }
}
