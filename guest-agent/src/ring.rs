//! Keeps the newest bytes of a detached process's output, up to a cap, with offsets from the first
//! byte.
//!
//! Offsets never change, so a client can continue where it stopped and learn what is lost.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::limits::{MAX_DATA, OUTPUT_WINDOW};
use pvmm_guest_agent::message::Kept;
use pvmm_guest_agent::window::{SendWindow, WindowError};

use crate::outbox::Outbox;

pub struct Ring {
    pub channel: Channel,
    /// `None` once the output has ended.
    pub fd: Option<OwnedFd>,
    bytes: VecDeque<u8>,
    /// Offset of the oldest byte.
    from: u64,
    cap: usize,
}

impl Ring {
    pub fn new(channel: Channel, fd: OwnedFd, cap: usize) -> Self {
        Self { channel, fd: Some(fd), bytes: VecDeque::new(), from: 0, cap }
    }

    pub fn kept(&self) -> Kept {
        Kept { from: self.from, to: self.to() }
    }

    fn to(&self) -> u64 {
        self.from + self.bytes.len() as u64
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        let excess = self.bytes.len().saturating_sub(self.cap);
        self.bytes.drain(..excess);
        self.from += excess as u64;
    }
}

/// The position of one client in a ring.
pub struct Cursor {
    at: u64,
    lost: u64,
    window: SendWindow,
    ended: bool,
}

impl Cursor {
    /// Starts at `from`, which may lie ahead, or at the beginning of the ring if that is later.
    pub fn new(ring: Option<&Ring>, from: u64) -> Self {
        let at = ring.map_or(0, |ring| from.max(ring.from));
        // A process with a terminal has one output; the other has ended.
        let ended = ring.is_none();
        Self { at, lost: at.saturating_sub(from), window: SendWindow::new(OUTPUT_WINDOW), ended }
    }

    pub fn at(&self) -> u64 {
        self.at
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    pub fn grant(&mut self, bytes: u32) -> Result<(), WindowError> {
        self.window.grant(bytes)
    }

    /// Returns the number of bytes that the client requested and that were lost.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Sends the available bytes, as far as window and outbox allow.
    pub fn pump(&mut self, ring: &Ring, out: &mut Outbox, stream: u32) {
        if self.at < ring.from {
            self.lost += ring.from - self.at;
            self.at = ring.from;
        }
        while !self.ended && out.has_room() {
            let waiting = ring.to().saturating_sub(self.at) as usize;
            let count = waiting.min(self.window.left()).min(MAX_DATA);
            if count == 0 {
                if ring.fd.is_none() && waiting == 0 {
                    out.data(stream, ring.channel, &[], true);
                    self.ended = true;
                }
                return;
            }
            let skip = (self.at - ring.from) as usize;
            let chunk: Vec<u8> = ring.bytes.range(skip..skip + count).copied().collect();
            out.data(stream, ring.channel, &chunk, false);
            self.window.sent(count);
            self.at += count as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_keeps_the_newest_bytes_and_their_offsets() {
        let fd = crate::sys::pipe().unwrap().0;
        let mut ring = Ring::new(Channel::Output, fd, 4);
        ring.push(b"abc");
        assert_eq!(ring.kept(), Kept { from: 0, to: 3 });
        ring.push(b"defghi");
        assert_eq!(ring.kept(), Kept { from: 5, to: 9 });
        assert_eq!(Cursor::new(Some(&ring), 7).at(), 7);
        let late = Cursor::new(Some(&ring), 1);
        assert_eq!((late.at(), late.lost()), (5, 4));
        let mut ahead = Cursor::new(Some(&ring), 11);
        let mut out = Outbox::default();
        ahead.pump(&ring, &mut out, 1);
        assert!(out.is_empty());
        ring.push(b"jklm");
        ahead.pump(&ring, &mut out, 1);
        assert_eq!(ahead.at(), 13);
    }
}
