//! One connection between a guest port and a host port, as a state machine without sockets.
//!
//! Packets and events of the host socket go in; a verdict and the next packet for the guest come
//! out. What the guest must still be notified of is kept as flags, not as queued packets, so a
//! connection takes constant space.

use super::credit::{ReceiveWindow, SendCredit};
use super::wire::{
    Header, MAX_PAYLOAD, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM,
};

/// The two ports that identify a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pair {
    pub host_port: u32,
    pub guest_port: u32,
}

/// How far a connection is established.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// A host client connects to the guest; `sent` once the guest has the request.
    Requested { sent: bool },
    /// The guest connects to a host socket, which is connected; the guest has no response yet.
    Accepting,
    /// Both sides are connected.
    Open,
}

/// The effect of a guest's packet on its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing more to do.
    Keep,
    /// The guest accepted a host client.
    Opened,
    /// The payload is for the host.
    Deliver,
    /// The guest shut down one direction.
    HalfClosed,
    /// The guest shut down both directions: confirm with a reset, forward the backlog.
    Finish,
    /// The guest reset the connection: forward the backlog.
    Vanish,
    /// The guest violated the protocol: reset and drop everything.
    Break,
}

/// The state of one connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    pub pair: Pair,
    pub phase: Phase,
    pub credit: SendCredit,
    pub window: ReceiveWindow,
    /// The host socket may have bytes or its end to read.
    pub readable: bool,
    /// How many receive buffers the next read may use; grows while reads fill them.
    pub burst: usize,
    // Shutdown flags: those of the guest, those of the host socket, and the latter as sent to the
    // guest.
    guest_done: u32,
    host_done: u32,
    sent_done: u32,
    owes_credit: bool,
    asked_credit: bool,
}

impl Connection {
    /// Creates a connection that a host client requested.
    pub fn from_host(pair: Pair, window: u32) -> Self {
        // The client's first bytes may have come with its request, before the socket was watched.
        Self { readable: true, ..Self::new(pair, Phase::Requested { sent: false }, window) }
    }

    /// Creates a connection that the guest requested with `request`.
    pub fn from_guest(pair: Pair, window: u32, request: &Header) -> Self {
        let mut connection = Self::new(pair, Phase::Accepting, window);
        connection.credit.update(request.buf_alloc, request.fwd_cnt);
        connection
    }

    /// Sets the counters as if `start` bytes had gone in each direction.
    #[cfg(test)]
    pub fn starting_at(self, start: u32) -> Self {
        let (credit, window) = (SendCredit::starting_at(start), self.window.starting_at(start));
        Self { credit, window, ..self }
    }

    fn new(pair: Pair, phase: Phase, window: u32) -> Self {
        Self {
            pair,
            phase,
            credit: SendCredit::default(),
            window: ReceiveWindow::new(window),
            readable: false,
            burst: 1,
            guest_done: 0,
            host_done: 0,
            sent_done: 0,
            owes_credit: false,
            asked_credit: false,
        }
    }

    /// Handles a packet from the guest. `header.len` must be the length of its payload.
    pub fn take(&mut self, op: Op, header: &Header) -> Verdict {
        if header.len > 0 && op != Op::Data {
            return Verdict::Break;
        }
        self.credit.update(header.buf_alloc, header.fwd_cnt);
        if self.credit.available() > 0 {
            self.asked_credit = false;
        }
        match (op, self.phase) {
            (Op::Reset, _) => Verdict::Vanish,
            (Op::Response, Phase::Requested { sent: true }) => {
                self.phase = Phase::Open;
                Verdict::Opened
            }
            (Op::Request | Op::Response, _) | (_, Phase::Requested { .. }) => Verdict::Break,
            (Op::Shutdown, _) => {
                self.guest_done |= header.flags & SHUTDOWN_BOTH;
                match self.guest_done {
                    SHUTDOWN_BOTH => Verdict::Finish,
                    _ => Verdict::HalfClosed,
                }
            }
            (Op::CreditUpdate, _) => Verdict::Keep,
            (Op::CreditRequest, _) => {
                self.owes_credit = true;
                Verdict::Keep
            }
            (Op::Data, Phase::Accepting) => Verdict::Break,
            (Op::Data, Phase::Open) => {
                let allowed = header.len <= MAX_PAYLOAD && self.guest_done & SHUTDOWN_SEND == 0;
                if !allowed || self.window.receive(header.len).is_err() {
                    return Verdict::Break;
                }
                Verdict::Deliver
            }
        }
    }

    /// Records that the host socket is at its end: nothing more will be read from it.
    pub fn host_ended(&mut self) {
        self.host_done |= SHUTDOWN_SEND;
    }

    /// Records that the host socket accepts no more bytes.
    pub fn host_deaf(&mut self) {
        self.host_done |= SHUTDOWN_RECEIVE;
    }

    /// Records that the peer closed the host socket. The guest is notified once everything is read,
    /// with one packet that ends both directions.
    pub fn host_hung_up(&mut self) {
        if self.host_done & SHUTDOWN_SEND != 0 || self.is_guest_deaf() {
            self.host_done = SHUTDOWN_BOTH;
        }
    }

    pub fn is_host_deaf(&self) -> bool {
        self.host_done & SHUTDOWN_RECEIVE != 0
    }

    /// Returns whether the guest will send no more.
    pub fn is_guest_done_sending(&self) -> bool {
        self.guest_done & SHUTDOWN_SEND != 0
    }

    /// Returns whether the guest will receive no more.
    pub fn is_guest_deaf(&self) -> bool {
        self.guest_done & SHUTDOWN_RECEIVE != 0
    }

    /// Returns whether the guest was sent a shutdown of both directions and should now reset.
    pub fn awaits_reset(&self) -> bool {
        self.sent_done == SHUTDOWN_BOTH
    }

    /// Returns whether the guest knows of this connection, and so must be notified of its end.
    pub fn is_known_to_guest(&self) -> bool {
        self.phase != Phase::Requested { sent: false }
    }

    /// Returns whether bytes may be read from the host socket and sent now.
    pub fn may_read(&self) -> bool {
        self.has_unread() && self.credit.available() > 0
    }

    /// Returns whether there is a packet to send.
    pub fn wants_to_send(&self) -> bool {
        self.control().is_some() || self.may_read()
    }

    /// Returns whether a packet without payload is to be sent; it goes before any data.
    pub fn wants_control(&self) -> bool {
        self.control().is_some()
    }

    /// Returns the next packet without payload and marks it as sent.
    pub fn next_control(&mut self) -> Option<Header> {
        let op = self.control()?;
        let mut flags = 0;
        match op {
            Op::Request => self.phase = Phase::Requested { sent: true },
            Op::Response => self.phase = Phase::Open,
            Op::Shutdown => {
                self.sent_done = self.host_done;
                flags = self.sent_done;
            }
            Op::CreditRequest => self.asked_credit = true,
            _ => {}
        }
        Some(Header { flags, ..self.header(op, 0) })
    }

    /// Returns the header for `len` bytes read from the host, and consumes their credit.
    pub fn data_header(&mut self, len: u32) -> Header {
        self.credit.consume(len);
        self.header(Op::Data, len)
    }

    fn control(&self) -> Option<Op> {
        match self.phase {
            Phase::Requested { sent: true } => None,
            Phase::Requested { sent: false } => Some(Op::Request),
            Phase::Accepting => Some(Op::Response),
            Phase::Open if self.owes_credit || self.window.wants_report() => Some(Op::CreditUpdate),
            Phase::Open if self.host_done != self.sent_done => Some(Op::Shutdown),
            Phase::Open if self.is_starved() && !self.asked_credit => Some(Op::CreditRequest),
            Phase::Open => None,
        }
    }

    /// Returns whether the host socket may have bytes that the guest would accept.
    pub fn has_unread(&self) -> bool {
        let done = self.host_done & SHUTDOWN_SEND != 0 || self.is_guest_deaf();
        self.phase == Phase::Open && self.readable && !done
    }

    fn is_starved(&self) -> bool {
        self.has_unread() && self.credit.available() == 0 && !self.credit.is_impossible()
    }

    fn header(&mut self, op: Op, len: u32) -> Header {
        self.owes_credit = false;
        let (buf_alloc, fwd_cnt) = self.window.report();
        Header {
            src_port: self.pair.host_port,
            dst_port: self.pair.guest_port,
            len,
            kind: TYPE_STREAM,
            op: op as u16,
            buf_alloc,
            fwd_cnt,
            ..Header::default()
        }
    }
}
