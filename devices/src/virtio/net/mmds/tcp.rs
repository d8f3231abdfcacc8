//! One connection of the metadata service: the part of TCP (RFC 9293) that a server needs for a
//! local peer.
//!
//! Segments are built only when the guest has a buffer for them, so there is no queue of frames to
//! fill or lose. Lost segments are sent again from the oldest unacknowledged byte; out-of-order
//! segments of the guest are dropped, so it has to send them again. The code is pure: the clock is
//! an argument.

use std::time::{Duration, Instant};

use super::packet::{MSS, Outgoing, Peer, Segment, flag};

/// The maximum number of received bytes that wait to be read; also the window that the peer is
/// offered.
pub const RECEIVE_MAX: usize = 4096;

// The MSS that RFC 9293 assumes of a peer that does not send one, and the minimum that Linux
// accepts.
const MSS_DEFAULT: u16 = 536;
const MSS_LEAST: u16 = 48;
const RETRANSMIT_FIRST: Duration = Duration::from_millis(300);
const RETRANSMITS_MAX: u32 = 7;

/// The fate of a connection after a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Lives,
    /// Both sides have closed, or the peer has reset it.
    Ends,
    /// The segment does not belong to the connection: reset it.
    Reset,
}

/// A connection that the peer opened.
pub struct Connection {
    peer: Peer,
    port: u16,
    established: bool,
    // The oldest unacknowledged byte, the next to send, and one past the last that was ever sent.
    una: u32,
    next: u32,
    highest: u32,
    window: u16,
    mss: u16,
    // Bytes from `una` on. SYN and FIN take a place in the sequence, but not here.
    out: Vec<u8>,
    closing: bool,
    fin_acked: bool,
    expected: u32,
    peer_closed: bool,
    received: Vec<u8>,
    ack_due: bool,
    // A byte is sent into a closed window, to learn whether it is still closed.
    probe: bool,
    retransmit_at: Option<Instant>,
    retransmits: u32,
    heard: Instant,
}

impl Connection {
    /// Opens a connection in answer to a SYN. `iss` is the initial sequence number and must not be
    /// guessable.
    pub fn open(syn: &Segment, iss: u32, now: Instant) -> Self {
        Self {
            peer: syn.peer,
            port: syn.port,
            established: false,
            una: iss,
            next: iss,
            highest: iss,
            window: syn.window,
            mss: syn.mss.unwrap_or(MSS_DEFAULT).clamp(MSS_LEAST, MSS),
            out: Vec::new(),
            closing: false,
            fin_acked: false,
            expected: syn.seq.wrapping_add(1),
            peer_closed: false,
            received: Vec::new(),
            ack_due: false,
            probe: false,
            retransmit_at: None,
            retransmits: 0,
            heard: now,
        }
    }

    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Returns when the peer last sent or acknowledged something new.
    pub fn heard(&self) -> Instant {
        self.heard
    }

    /// Returns when something must be retransmitted.
    pub fn retransmit_at(&self) -> Option<Instant> {
        self.retransmit_at
    }

    /// Returns the bytes that were received and not yet taken.
    pub fn received(&self) -> &[u8] {
        &self.received
    }

    /// Returns whether the peer will send no more.
    pub fn peer_closed(&self) -> bool {
        self.peer_closed
    }

    /// Returns whether everything sent was acknowledged and more may be sent.
    pub fn is_idle(&self) -> bool {
        self.established && self.out.is_empty() && !self.closing
    }

    /// Removes the first received bytes, which makes room for more.
    pub fn take(&mut self, len: usize) {
        let was_full = self.received.len() >= RECEIVE_MAX / 2;
        self.received.drain(..len.min(self.received.len()));
        self.ack_due |= was_full;
    }

    pub fn send(&mut self, bytes: Vec<u8>) {
        self.out.extend(bytes);
    }

    /// Closes once everything has been sent. Bytes received from now on are dropped.
    pub fn close(&mut self) {
        self.closing = true;
        self.received = Vec::new();
    }

    /// Receives a segment of this connection.
    pub fn receive(&mut self, segment: &Segment, now: Instant) -> Fate {
        let has = |bit| segment.flags & bit != 0;
        if has(flag::RST) {
            // Only a reset at the next expected byte is accepted.
            return if segment.seq == self.expected { Fate::Ends } else { Fate::Lives };
        }
        if has(flag::SYN) {
            if !self.established && segment.seq.wrapping_add(1) == self.expected {
                // The SYN-ACK was lost.
                self.next = self.una;
            } else {
                self.ack_due = true;
            }
            return Fate::Lives;
        }
        if !has(flag::ACK) {
            return Fate::Lives;
        }
        let acked = segment.ack.wrapping_sub(self.una);
        if acked > self.highest.wrapping_sub(self.una) {
            // An old acknowledgement, or one of bytes that were never sent.
            self.ack_due = self.established;
            return if self.established { Fate::Lives } else { Fate::Reset };
        }
        self.acknowledge(acked, now);
        if !self.established {
            return Fate::Lives;
        }
        self.window = segment.window;
        self.take_in(segment, now);
        if self.fin_acked && self.peer_closed && !self.ack_due { Fate::Ends } else { Fate::Lives }
    }

    /// Handles the acknowledgement of `acked` more sequence numbers.
    fn acknowledge(&mut self, mut acked: u32, now: Instant) {
        if acked == 0 {
            return;
        }
        self.una = self.una.wrapping_add(acked);
        if !self.established {
            self.established = true;
            acked -= 1;
        }
        let bytes = (acked as usize).min(self.out.len());
        self.out.drain(..bytes);
        // One more than there were bytes: the FIN.
        self.fin_acked |= acked as usize > bytes;
        // A retransmission may have moved `next` back to before bytes that have been acknowledged
        // since.
        if (self.next.wrapping_sub(self.una) as i32) < 0 {
            self.next = self.una;
        }
        (self.retransmits, self.heard) = (0, now);
        let outstanding = self.next != self.una;
        self.retransmit_at = outstanding.then(|| now + RETRANSMIT_FIRST);
    }

    /// Accepts the bytes that follow the last one received. Anything else is only acknowledged.
    fn take_in(&mut self, segment: &Segment, now: Instant) {
        let fin = segment.flags & flag::FIN != 0;
        if segment.payload.is_empty() && !fin {
            // An empty segment with an older sequence number is a keep-alive probe.
            self.ack_due |= segment.seq != self.expected;
            return;
        }
        self.ack_due = true;
        let seen = self.expected.wrapping_sub(segment.seq) as usize;
        let Some(fresh) = segment.payload.get(seen..) else { return };
        if self.peer_closed {
            return;
        }
        let taken = if self.closing { fresh.len() } else { fresh.len().min(self.room()) };
        if !self.closing {
            self.received.extend(&fresh[..taken]);
        }
        self.expected = self.expected.wrapping_add(taken as u32);
        if taken > 0 {
            self.heard = now;
        }
        if fin && taken == fresh.len() {
            self.peer_closed = true;
            self.expected = self.expected.wrapping_add(1);
        }
    }

    fn room(&self) -> usize {
        RECEIVE_MAX.saturating_sub(self.received.len())
    }

    /// Handles the retransmission timer. Returns false if the peer has not answered for so long
    /// that the connection is given up.
    pub fn tick(&mut self, now: Instant) -> bool {
        if self.retransmit_at.is_none_or(|at| at > now) {
            return true;
        }
        self.retransmits += 1;
        self.retransmit_at = None;
        self.probe = self.window == 0;
        self.next = self.una;
        self.retransmits <= RETRANSMITS_MAX
    }

    /// Returns the next segment to send, if there is one. The caller must send it.
    pub fn next_segment(&mut self, now: Instant) -> Option<Outgoing<'_>> {
        if !self.established {
            if self.next != self.una {
                return None;
            }
            return Some(self.outgoing(self.una, flag::SYN | flag::ACK, 0..0, 1, now));
        }
        let sent = self.next.wrapping_sub(self.una) as usize;
        let left = self.out.len().saturating_sub(sent);
        let window = usize::from(self.window).max(usize::from(self.probe));
        let len = left.min(window.saturating_sub(sent)).min(self.mss.into());
        if len > 0 {
            self.probe = false;
            let push = if len == left { flag::PSH } else { 0 };
            let range = sent..sent + len;
            return Some(self.outgoing(self.next, flag::ACK | push, range, len as u32, now));
        }
        if left > 0 && sent == 0 && self.retransmit_at.is_none() {
            // The window is closed; the timer decides when to probe it.
            self.arm(now);
        }
        if self.closing && left == 0 && sent == self.out.len() && !self.fin_acked {
            return Some(self.outgoing(self.next, flag::ACK | flag::FIN, 0..0, 1, now));
        }
        self.ack_due.then(|| self.outgoing(self.next, flag::ACK, 0..0, 0, now))
    }

    /// Returns whether both sides have closed and no acknowledgement is left to send.
    pub fn is_over(&self) -> bool {
        self.fin_acked && self.peer_closed && !self.ack_due
    }

    fn arm(&mut self, now: Instant) {
        self.retransmit_at = Some(now + RETRANSMIT_FIRST * (1 << self.retransmits.min(6)));
    }

    fn outgoing(
        &mut self,
        seq: u32,
        flags: u8,
        range: std::ops::Range<usize>,
        takes: u32,
        now: Instant,
    ) -> Outgoing<'_> {
        self.ack_due = false;
        if takes > 0 {
            self.next = seq.wrapping_add(takes);
            if (self.next.wrapping_sub(self.highest) as i32) > 0 {
                self.highest = self.next;
            }
            if self.retransmit_at.is_none() {
                self.arm(now);
            }
        }
        Outgoing {
            peer: self.peer,
            port: self.port,
            seq,
            ack: self.expected,
            flags,
            window: self.room() as u16,
            payload: self.out.get(range).unwrap_or(&[]),
        }
    }
}
