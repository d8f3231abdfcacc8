//! The table of the guest's connections, and the TCP stack that they share.
//!
//! A socket listens for one connection only, and exists from just before its first segment is given
//! to smoltcp. Segments of connections that are not in the table never reach the stack.

use std::collections::HashMap;
use std::time::Instant;

use smoltcp::iface::{Config, Interface, PollResult, SocketSet};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::{Duration, Instant as StackInstant};
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr, IpListenEndpoint};

use crate::connection::{Basis, Connection, ConnectionKey};
use crate::frame::Segment;
use crate::link::Link;
use crate::policy::Policy;
use crate::secrets::Secrets;
use crate::token::Token;

/// The most connections at once, and the most of them in their handshake.
pub const CONNECTIONS_MAX: usize = 512;
pub const HALF_OPEN_MAX: usize = 64;
/// The buffer of each direction.
const BUFFER: usize = 64 << 10;
const UNANSWERED: Duration = Duration::from_secs(120);
const KEEP_ALIVE: Duration = Duration::from_secs(30);
// Rounds of sending in one turn; a round sends at least one segment of each socket that has some.
const ROUNDS_MAX: usize = 64;

/// All connections of the guest.
pub struct Connections {
    stack: Interface,
    sockets: SocketSet<'static>,
    by_key: HashMap<ConnectionKey, u32>,
    by_number: HashMap<u32, Connection>,
    last: u32,
    started: Instant,
}

impl Connections {
    pub fn new(link: &mut Link, seed: u64, now: Instant) -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = seed;
        let mut stack = Interface::new(config, link, StackInstant::ZERO);
        let gateway = link.ends.gateway_ip;
        stack.update_ip_addrs(|addresses| {
            // The list is empty and has room for at least one.
            let _ = addresses.push(IpCidr::new(IpAddress::Ipv4(gateway), 24));
        });
        // Every address is accepted as the stack's own; the gateway decides which segments it sees.
        stack.set_any_ip(true);
        let _ = stack.routes_mut().add_default_ipv4_route(gateway);
        Self {
            stack,
            sockets: SocketSet::new(Vec::new()),
            by_key: HashMap::new(),
            by_number: HashMap::new(),
            last: 0,
            started: now,
        }
    }

    pub fn count(&self) -> usize {
        self.by_number.len()
    }

    /// Returns the identities of all connections.
    pub fn keys(&self) -> impl Iterator<Item = &ConnectionKey> {
        self.by_key.keys()
    }

    pub fn contains(&self, key: &ConnectionKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// Returns whether a segment belongs to a connection. A new handshake from a port whose last
    /// connection is over makes room for the new one.
    pub fn has(&mut self, segment: &Segment<'_>) -> bool {
        let Some(number) = self.by_key.get(&key_of(segment)).copied() else { return false };
        let over = self.by_number.get(&number).is_none_or(|connection| {
            let state = self.sockets.get::<Socket>(connection.handle).state();
            matches!(state, State::TimeWait | State::Closed | State::Listen)
        });
        if over && segment.syn && !segment.ack {
            self.remove(number);
            return false;
        }
        true
    }

    /// Returns whether there is room for a new connection.
    pub fn has_room(&mut self) -> bool {
        let state = |connection: &Connection| self.sockets.get::<Socket>(connection.handle).state();
        let half_open = |connection: &&Connection| state(connection) == State::SynReceived;
        if self.by_number.values().filter(half_open).count() >= HALF_OPEN_MAX {
            return false;
        }
        if self.by_number.len() < CONNECTIONS_MAX {
            return true;
        }
        let is_over = |(_, connection): &(&u32, &Connection)| state(connection) == State::TimeWait;
        let over = self.by_number.iter().find(is_over).map(|(number, _)| *number);
        over.is_some_and(|number| {
            self.remove(number);
            true
        })
    }

    /// Accepts a handshake's first segment.
    pub fn accept(
        &mut self,
        segment: &Segment<'_>,
        basis: Basis,
        link: &mut Link,
        (policy, secrets): (&Policy, &Secrets),
        now: Instant,
    ) {
        let buffer = || SocketBuffer::new(vec![0; BUFFER]);
        let mut socket = Socket::new(buffer(), buffer());
        socket.set_timeout(Some(UNANSWERED));
        socket.set_keep_alive(Some(KEEP_ALIVE));
        socket.set_nagle_enabled(false);
        let (to, port) = (*segment.destination.ip(), segment.destination.port());
        let local = IpListenEndpoint { addr: Some(IpAddress::Ipv4(to)), port };
        if socket.listen(local).is_err() {
            return;
        }
        let handle = self.sockets.add(socket);
        self.feed(segment, link, now);
        if self.sockets.get::<Socket>(handle).state() != State::SynReceived {
            // The stack found something wrong with the segment.
            self.sockets.remove(handle);
            return;
        }
        self.last = self.last.wrapping_add(1);
        let (number, key) = (self.last, key_of(segment));
        let connection =
            Connection::new(key, handle, basis, Token::Connection(number), policy, secrets, now);
        self.by_number.insert(number, connection);
        self.by_key.insert(key, number);
    }

    /// Gives a segment to the stack.
    pub fn feed(&mut self, segment: &Segment<'_>, link: &mut Link, now: Instant) {
        link.put(segment.packet);
        let at = self.stack_time(now);
        self.stack.poll_ingress_single(at, link, &mut self.sockets);
    }

    /// Sends what the stack has to send.
    pub fn send(&mut self, link: &mut Link, now: Instant) {
        let at = self.stack_time(now);
        for _ in 0..ROUNDS_MAX {
            if self.stack.poll_egress(at, link, &mut self.sockets) == PollResult::None {
                break;
            }
        }
    }

    /// Calls `act` for every connection.
    pub fn each(&mut self, mut act: impl FnMut(u32, &mut Connection, &mut Socket<'static>)) {
        for (number, connection) in &mut self.by_number {
            act(*number, connection, self.sockets.get_mut::<Socket>(connection.handle));
        }
    }

    /// Calls `act` for one connection.
    pub fn with<R>(
        &mut self,
        number: u32,
        act: impl FnOnce(&mut Connection, &mut Socket<'static>) -> R,
    ) -> Option<R> {
        let connection = self.by_number.get_mut(&number)?;
        let socket = self.sockets.get_mut::<Socket>(connection.handle);
        Some(act(connection, socket))
    }

    /// Removes the connections of which the guest has nothing more to hear.
    pub fn reap(&mut self) {
        let is_over = |connection: &Connection| {
            let socket = self.sockets.get::<Socket>(connection.handle);
            // A closed socket that has a peer still has to send its reset.
            let told = socket.remote_endpoint().is_none();
            socket.state() == State::Listen || socket.state() == State::Closed && told
        };
        let over = self.by_number.iter().filter(|(_, connection)| is_over(connection));
        let over: Vec<u32> = over.map(|(number, _)| *number).collect();
        over.into_iter().for_each(|number| self.remove(number));
    }

    /// Returns the time at which the stack or a connection has something to do without an event.
    pub fn deadline(&mut self, now: Instant) -> Option<Instant> {
        let at = self.stack_time(now);
        let stack = self.stack.poll_delay(at, &self.sockets);
        let stack = stack.map(|delay| now + std::time::Duration::from(delay));
        [stack, self.own_deadline()].into_iter().flatten().min()
    }

    /// Returns the earliest deadline of the connections themselves.
    pub fn own_deadline(&self) -> Option<Instant> {
        self.by_number.values().filter_map(Connection::deadline).min()
    }

    pub fn has_more(&self) -> bool {
        self.by_number
            .values()
            .any(|connection| connection.has_more(self.sockets.get::<Socket>(connection.handle)))
    }

    fn remove(&mut self, number: u32) {
        if let Some(connection) = self.by_number.remove(&number) {
            self.by_key.remove(&connection.key);
            self.sockets.remove(connection.handle);
        }
    }

    fn stack_time(&self, now: Instant) -> StackInstant {
        let passed = now.saturating_duration_since(self.started);
        StackInstant::from_micros(i64::try_from(passed.as_micros()).unwrap_or(i64::MAX))
    }
}

/// Returns the identity of a segment's connection.
pub fn key_of(segment: &Segment<'_>) -> ConnectionKey {
    ConnectionKey { guest_port: segment.source_port, destination: segment.destination }
}
