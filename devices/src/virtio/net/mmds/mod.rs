//! The metadata service: it answers the frames that the guest sends to its address, which never
//! reach the tap.
//!
//! | file | contents |
//! | --- | --- |
//! | `config.rs` | the address and the version of the service |
//! | `packet.rs` | which frames are accepted, and how frames are built |
//! | `tcp.rs` | the state of one connection |
//! | `http.rs` | how a request is parsed and a response encoded |
//! | `answer.rs` | the response to a request |
//! | `token.rs` | the tokens of version 2 |
//!
//! The guest is hostile and all devices share the device thread: a frame costs a bounded amount of
//! work, the number of connections and their buffers are bounded, and nothing waits. The TCP is our
//! own because so little of it is needed: an endpoint that never opens a connection, never
//! reorders, and builds a segment only when there is room for it. No part of it is in a snapshot; a
//! restored guest gets a reset on its old connections.

mod answer;
mod config;
mod http;
mod packet;
mod tcp;
mod token;

#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

pub use config::{MmdsConfig, MmdsVersion};
pub use packet::{PEEK_LEN, SENT_MAX};

use self::http::{Found, MmdsAnswer};
use self::packet::{Frame, Outgoing, Peer, Segment, flag};
use self::tcp::{Connection, Fate, RECEIVE_MAX};
use self::token::Tokens;
use super::wire::ETHERNET_LEN;
use crate::sys;

/// The longest frame that is read: larger than the window that the guest is offered.
pub const RECEIVED_MAX: usize = ETHERNET_LEN + 2 * 60 + RECEIVE_MAX;
/// The maximum size of the content, as JSON.
pub const CONTENT_MAX: usize = 1 << 20;

const PORT: u16 = 80;
const CONNECTIONS_MAX: usize = 30;
/// How long a connection may be idle.
const IDLE: Duration = Duration::from_secs(30);
// Pending resets for segments without a connection. Beyond this none is sent, and the guest
// retransmits.
const RESETS_MAX: usize = 8;

/// The metadata service of one card.
pub struct Mmds {
    config: MmdsConfig,
    guest: [u8; 6],
    content: Arc<Value>,
    tokens: Tokens,
    connections: VecDeque<Connection>,
    // Frames to send in addition to the segments of connections.
    arp: Option<packet::ArpRequest>,
    resets: VecDeque<Reset>,
    next: Option<Vec<u8>>,
}

struct Reset {
    peer: Peer,
    port: u16,
    seq: u32,
    ack: Option<u32>,
}

impl Mmds {
    /// Creates a service without content, for the card with the address `guest`.
    pub fn new(config: MmdsConfig, guest: [u8; 6]) -> Self {
        Self {
            config,
            guest,
            content: Arc::new(Value::Null),
            tokens: Tokens::default(),
            connections: VecDeque::new(),
            arp: None,
            resets: VecDeque::new(),
            next: None,
        }
    }

    pub fn config(&self) -> MmdsConfig {
        self.config
    }

    pub fn set_content(&mut self, content: Arc<Value>) {
        self.content = content;
    }

    /// Forgets all connections, because another driver starts. Content and tokens stay.
    pub fn reset(&mut self) {
        self.connections.clear();
        self.resets.clear();
        (self.arp, self.next) = (None, None);
    }

    /// Returns whether a frame is for the service, by its first bytes.
    pub fn is_for_us(&self, ethernet: &[u8; ETHERNET_LEN], payload: &[u8]) -> bool {
        packet::is_for(self.config.ipv4, ethernet, payload)
    }

    /// Receives a frame for the service. Returns false if there is nothing in it to answer.
    pub fn receive(&mut self, frame: &[u8], now: Instant) -> bool {
        match packet::parse(frame) {
            Some(Frame::Arp(request)) => self.arp = Some(request),
            Some(Frame::Tcp(segment)) => self.receive_segment(&segment, now),
            None => return false,
        }
        true
    }

    fn receive_segment(&mut self, segment: &Segment, now: Instant) {
        let found = self.connections.iter().position(|one| one.peer() == segment.peer);
        let known = found.filter(|_| segment.port == PORT);
        match known.and_then(|at| self.connections.get_mut(at).map(|one| (at, one))) {
            Some((at, connection)) => {
                let fate = connection.receive(segment, now);
                serve(connection, &self.config, &self.content, &mut self.tokens, now);
                match fate {
                    Fate::Lives => return,
                    Fate::Ends => {}
                    Fate::Reset => self.refuse(segment),
                }
                self.connections.remove(at);
            }
            None if segment.port == PORT && opens(segment) => self.open(segment, now),
            None => self.refuse(segment),
        }
    }

    /// Opens a connection. If the maximum number is reached, the one that was idle for longest is
    /// removed.
    fn open(&mut self, syn: &Segment, now: Instant) {
        let mut iss = [0; 4];
        if sys::random(&mut iss).is_err() {
            return;
        }
        if self.connections.len() == CONNECTIONS_MAX {
            let quietest = self.connections.iter().enumerate().min_by_key(|(_, one)| one.heard());
            if let Some((at, _)) = quietest {
                self.connections.remove(at);
            }
        }
        self.connections.push_back(Connection::open(syn, u32::from_le_bytes(iss), now));
    }

    /// Queues a reset for a segment that has no connection (RFC 9293 section 3.10.7.1).
    fn refuse(&mut self, segment: &Segment) {
        if segment.flags & flag::RST != 0 || self.resets.len() == RESETS_MAX {
            return;
        }
        let (seq, ack) = if segment.flags & flag::ACK != 0 {
            (segment.ack, None)
        } else {
            let places = u32::from(segment.flags & flag::SYN != 0)
                + u32::from(segment.flags & flag::FIN != 0)
                + segment.payload.len() as u32;
            (0, Some(segment.seq.wrapping_add(places)))
        };
        self.resets.push_back(Reset { peer: segment.peer, port: segment.port, seq, ack });
    }

    /// Returns whether there is a frame for the guest. It is kept until `take_frame`.
    pub fn is_ready(&mut self, now: Instant) -> bool {
        if self.next.is_none() {
            self.next = self.make_frame(now);
        }
        self.next.is_some()
    }

    /// Takes the frame that `is_ready` reported, at most `SENT_MAX` bytes long.
    pub fn take_frame(&mut self) -> Option<Vec<u8>> {
        self.next.take()
    }

    fn make_frame(&mut self, now: Instant) -> Option<Vec<u8>> {
        let Self { config, guest, connections, .. } = self;
        if let Some(request) = self.arp.take() {
            return Some(packet::arp_reply(config.ipv4, request, *guest));
        }
        if let Some(Reset { peer, port, seq, ack }) = self.resets.pop_front() {
            let flags = if ack.is_some() { flag::RST | flag::ACK } else { flag::RST };
            let ack = ack.unwrap_or(0);
            let reset = Outgoing { peer, port, seq, ack, flags, window: 0, payload: &[] };
            return Some(packet::tcp(config.ipv4, &reset, *guest));
        }
        connections.retain_mut(|one| {
            one.tick(now) && now.saturating_duration_since(one.heard()) < IDLE && !one.is_over()
        });
        // Round robin: the connection that was served goes to the end.
        for _ in 0..connections.len() {
            let mut connection = connections.pop_front()?;
            let frame = connection
                .next_segment(now)
                .map(|outgoing| packet::tcp(config.ipv4, &outgoing, *guest));
            connections.push_back(connection);
            if frame.is_some() {
                return frame;
            }
        }
        None
    }

    /// Returns the time at which the service must run even without a frame of the guest.
    pub fn wakes_at(&self) -> Option<Instant> {
        let due = |one: &Connection| one.retransmit_at().into_iter().chain([one.heard() + IDLE]);
        // While a frame waits for room, the guest's next buffers wake the card.
        let waits = self.next.is_some();
        self.connections.iter().flat_map(due).min().filter(|_| !waits)
    }
}

fn opens(segment: &Segment) -> bool {
    segment.flags & (flag::SYN | flag::ACK | flag::RST | flag::FIN) == flag::SYN
}

/// Answers the received request, if it is complete and the previous response is sent.
fn serve(
    connection: &mut Connection,
    config: &MmdsConfig,
    content: &Value,
    tokens: &mut Tokens,
    now: Instant,
) {
    if !connection.is_idle() {
        return;
    }
    match http::read(connection.received()) {
        Found::MmdsRequest(request, len) => {
            let keep_alive = request.keeps_alive();
            let answer = answer::answer(config, content, tokens, &request, now);
            connection.send(answer.encode(keep_alive));
            connection.take(len);
            if !keep_alive {
                connection.close();
            }
        }
        Found::Part if connection.received().len() >= RECEIVE_MAX => {
            refuse(connection, "the request is too long");
        }
        Found::Part if connection.peer_closed() => connection.close(),
        Found::Part => {}
        Found::Bad(why) => refuse(connection, why),
    }
}

fn refuse(connection: &mut Connection, why: &str) {
    connection.send(MmdsAnswer::text(400, why).encode(false));
    connection.close();
}
