//! One connection between a guest port and a host port, as a state machine without sockets.
//!
//! Packets and what the host socket did go in; a verdict and the next packet for the guest come out.
//! What must be told to the guest is kept as flags, not as queued packets, so a connection can owe
//! any amount of news in constant space.

use super::credit::{ReceiveWindow, SendCredit};
use super::wire::{
    Header, MAX_PAYLOAD, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND, TYPE_STREAM,
};

/// The two ports that name a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pair {
    pub host_port: u32,
    pub guest_port: u32,
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// A host client wants the guest; `told` once the guest has the request.
    Requested { told: bool },
    /// The guest wants a host socket, which is there; the guest does not know yet.
    Accepting,
    /// Both sides know.
    Open,
}

/// What a packet from the guest means for its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing more to do.
    Keep,
    /// The guest accepted a host client.
    Opened,
    /// The payload is for the host.
    Deliver,
    /// The guest shut down part of its side.
    HalfClosed,
    /// The guest wants no more in either direction: confirm with a reset, pass on what is held.
    Finish,
    /// The guest dropped the connection: pass on what is held.
    Vanish,
    /// The guest broke the protocol: reset and drop everything.
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
    // Shutdown flags: what the guest said, what the host socket did, what the guest was told of that.
    guest_done: u32,
    host_done: u32,
    told_done: u32,
    owes_credit: bool,
    asked_credit: bool,
}

impl Connection {
    /// A connection that a host client asks for.
    pub fn from_host(pair: Pair, window: u32) -> Self {
        // The client's first bytes may have come with its request, before anyone watched for them.
        Self { readable: true, ..Self::new(pair, Phase::Requested { told: false }, window) }
    }

    /// A connection that the guest asks for with `request`.
    pub fn from_guest(pair: Pair, window: u32, request: &Header) -> Self {
        let mut connection = Self::new(pair, Phase::Accepting, window);
        connection.credit.update(request.buf_alloc, request.fwd_cnt);
        connection
    }

    /// As if `start` bytes had gone in each direction.
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
            told_done: 0,
            owes_credit: false,
            asked_credit: false,
        }
    }

    /// Judges a packet from the guest; `header.len` is known to be the length of its payload.
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
            (Op::Response, Phase::Requested { told: true }) => {
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

    /// The host socket came to its end: nothing more will be read from it.
    pub fn host_ended(&mut self) {
        self.host_done |= SHUTDOWN_SEND;
    }

    /// The host socket takes nothing any more.
    pub fn host_deaf(&mut self) {
        self.host_done |= SHUTDOWN_RECEIVE;
    }

    /// The host socket is closed at its other end. The guest hears of that once all was read, in the
    /// packet that ends both directions.
    pub fn host_hung_up(&mut self) {
        if self.host_done & SHUTDOWN_SEND != 0 || self.is_guest_deaf() {
            self.host_done = SHUTDOWN_BOTH;
        }
    }

    pub fn is_host_deaf(&self) -> bool {
        self.host_done & SHUTDOWN_RECEIVE != 0
    }

    /// Whether the guest will send no more.
    pub fn is_guest_done_sending(&self) -> bool {
        self.guest_done & SHUTDOWN_SEND != 0
    }

    /// Whether the guest will read no more.
    pub fn is_guest_deaf(&self) -> bool {
        self.guest_done & SHUTDOWN_RECEIVE != 0
    }

    /// Whether the guest was told that the host side is gone altogether, and should now reset.
    pub fn awaits_reset(&self) -> bool {
        self.told_done == SHUTDOWN_BOTH
    }

    /// Whether the guest knows of this connection, and so must hear of its end.
    pub fn is_known_to_guest(&self) -> bool {
        self.phase != Phase::Requested { told: false }
    }

    /// Whether bytes may be read from the host socket and sent now.
    pub fn may_read(&self) -> bool {
        self.has_unread() && self.credit.available() > 0
    }

    /// Whether there is a packet to send.
    pub fn wants_to_send(&self) -> bool {
        self.control().is_some() || self.may_read()
    }

    /// Whether a packet without payload is to be sent, which goes before any data.
    pub fn wants_control(&self) -> bool {
        self.control().is_some()
    }

    /// The next packet without payload, which then counts as sent.
    pub fn next_control(&mut self) -> Option<Header> {
        let op = self.control()?;
        let mut flags = 0;
        match op {
            Op::Request => self.phase = Phase::Requested { told: true },
            Op::Response => self.phase = Phase::Open,
            Op::Shutdown => {
                self.told_done = self.host_done;
                flags = self.told_done;
            }
            Op::CreditRequest => self.asked_credit = true,
            _ => {}
        }
        Some(Header { flags, ..self.header(op, 0) })
    }

    /// The header for `len` bytes read from the host.
    pub fn data_header(&mut self, len: u32) -> Header {
        self.credit.consume(len);
        self.header(Op::Data, len)
    }

    fn control(&self) -> Option<Op> {
        match self.phase {
            Phase::Requested { told: true } => None,
            Phase::Requested { told: false } => Some(Op::Request),
            Phase::Accepting => Some(Op::Response),
            Phase::Open if self.owes_credit || self.window.wants_report() => Some(Op::CreditUpdate),
            Phase::Open if self.host_done != self.told_done => Some(Op::Shutdown),
            Phase::Open if self.is_starved() && !self.asked_credit => Some(Op::CreditRequest),
            Phase::Open => None,
        }
    }

    /// Whether the host socket may have something that the guest would take.
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
