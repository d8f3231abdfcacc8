//! The multiplexer: many host streams over one pair of queues, independent of virtqueues and file
//! descriptors.
//!
//! The worker passes it packets, readiness and the time; the multiplexer decides. `from_guest.rs`
//! handles packets of the guest, `to_guest.rs` fills receive buffers, `from_host.rs` handles host
//! sockets and deadlines, `table.rs` holds the connections.

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

/// The first host port for clients; they are below the guest's own ephemeral ports.
pub const FIRST_HOST_PORT: u32 = 1 << 30;
/// One past the last host port for clients.
pub const LAST_HOST_PORT: u32 = 1 << 31;

/// Bounds on everything that a guest or a host client could make grow.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The number of streams: clients, connections and draining streams together.
    pub connections: usize,
    /// The number of resets that may wait for receive buffers before no more packets are taken from
    /// the guest.
    pub resets: usize,
    /// The time for a client to send its request, for either side to answer, and for the guest to
    /// confirm a hang-up.
    pub half_open: Duration,
    /// The time in which a host socket must accept some of the bytes that a finished connection
    /// left.
    pub drain: Duration,
    /// The pause before clients are accepted again after the host ran out of a resource.
    pub accept_retry: Duration,
    /// The receive window that every connection gets, and the one it gets while the budget lasts.
    pub base_window: u32,
    pub full_window: u32,
    /// The bytes that all connections together may hold beyond their base windows.
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

/// Counts of unusual events since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets without a header, or from or to a wrong address.
    pub dropped: u64,
    /// Packets answered with a reset.
    pub refused: u64,
    /// Connections and clients refused because the table was full.
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

    /// Drops all connections and returns the host side and the next port for a client.
    pub fn into_parts(self) -> (H, u32) {
        (self.host, self.next_host_port)
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the number of streams.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes held for host sockets in all connections.
    pub fn held(&self) -> usize {
        self.table.held()
    }

    /// Ends every stream and drops the resets owed to the guest.
    pub fn clear(&mut self) {
        self.table.clear();
        self.resets.clear();
    }

    /// Returns the time at which the multiplexer must run even if no event occurs.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.table.next_deadline().into_iter().chain(self.accept_again).min()
    }

    /// Moves all deadlines by a time in which the guest could not answer.
    pub fn postpone(&mut self, by: Duration) {
        self.table.postpone(by);
    }

    pub fn next_host_port(&self) -> u32 {
        self.next_host_port
    }

    /// Returns whether the guest may have a connection that it believes open.
    pub fn has_connections(&self) -> bool {
        self.table.connections().next().is_some()
    }

    /// Returns resets for the connections that a restored guest would wait for in vain. A transport
    /// reset only reaches the connections that the guest believes established.
    pub fn owed_after_restore(&self) -> Vec<OwedReset> {
        let half_open =
            self.table.connections().filter(|c| c.phase == super::connection::Phase::Accepting);
        let half_open = half_open.map(|connection| OwedReset::stream(connection.pair));
        self.resets.iter().copied().chain(half_open).collect()
    }

    /// Adds the resets that a saved device owed.
    pub fn owe(&mut self, resets: impl IntoIterator<Item = OwedReset>) {
        self.resets.extend(resets);
    }

    /// Takes the streams that the event loop must stop watching before they are closed.
    pub fn take_retired(&mut self) -> Vec<H::Stream> {
        self.table.take_retired()
    }

    /// Calls `watch` for each stream that is to be watched anew or differently. Its arguments are
    /// the slot, the stream, whether it is watched already, and whether to watch for room to write.
    /// An error ends the stream.
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

    /// Ends a connection from this side, and owes the guest a reset if it knows of the connection.
    fn abort(&mut self, slot: usize) {
        let Some(entry) = self.table.get(slot) else { return };
        let known = entry.connection().filter(|connection| connection.is_known_to_guest());
        let pair = known.map(|connection| connection.pair);
        self.table.remove(slot);
        if let Some(pair) = pair {
            self.resets.push_back(OwedReset::stream(pair));
        }
    }

    /// Returns an unused pair of a host port and `guest_port`.
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

/// Accessors with which tests check that nothing is left over.
#[cfg(any(test, feature = "testing"))]
impl<H: Host> Mux<H> {
    pub fn host_mut(&mut self) -> &mut H {
        &mut self.host
    }

    pub fn knows(&self, pair: Pair) -> bool {
        self.table.find(pair).is_some()
    }

    /// Returns the connections whose host socket has bytes that the guest could take.
    pub fn unread_pairs(&self) -> Vec<Pair> {
        let unread = self.table.connections().filter(|connection| connection.has_unread());
        unread.map(|connection| connection.pair).collect()
    }
}
