//! The frames that a connection has to send, in one bounded buffer.
//!
//! Pipes are read straight into it, so that output is copied once on its way to the socket.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use pvmm_guest_agent::encode;
use pvmm_guest_agent::frame::{self, Channel, END, HEADER_LEN, Header, Kind};
use serde::Serialize;

use crate::sys;

/// Above this size, no more output is read from pipes.
const OUTPUT_MARK: usize = 128 << 10;
/// Above this size, the client's own frames are not read either: each may need an answer.
const ANSWER_MARK: usize = 256 << 10;
/// How long a frame that no client waits for may be held back to be sent with others. A short
/// command is over by then, and is reported in one packet instead of four.
const LINGER: Duration = Duration::from_millis(50);
/// The most capacity that an empty buffer keeps.
const KEEP: usize = 256 << 10;

/// Frames waiting to be sent.
#[derive(Default)]
pub struct Outbox {
    buffer: Vec<u8>,
    sent: usize,
    /// A client waits for what is in the buffer.
    awaited: bool,
    /// When the buffer is sent even if no client waits for it.
    due: Option<Instant>,
}

impl Outbox {
    fn pending(&self) -> usize {
        self.buffer.len() - self.sent
    }

    pub fn is_empty(&self) -> bool {
        self.pending() == 0
    }

    /// Returns whether something should be sent now.
    pub fn is_due(&self) -> bool {
        !self.is_empty() && (self.awaited || self.due.is_none_or(|due| due <= Instant::now()))
    }

    /// Returns when held-back frames are sent at the latest; `None` if there are none.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Adds a control frame that may be held back to be sent with others.
    pub fn control_unhurried<T: Serialize>(&mut self, kind: Kind, stream: u32, message: &T) {
        // A frame that cannot be encoded is left out, as in `control`.
        let _ = encode(&mut self.buffer, kind, stream, message);
        self.linger();
    }

    /// Adds the end of a channel, which may be held back to be sent with others.
    pub fn end_unhurried(&mut self, stream: u32, channel: Channel) {
        let header = Header::new(Kind::Data, stream, channel.bits() | END, 0);
        self.buffer.extend_from_slice(&header.to_bytes());
        self.linger();
    }

    fn linger(&mut self) {
        self.due.get_or_insert_with(|| Instant::now() + LINGER);
    }

    /// Returns whether output may be added.
    pub fn has_room(&self) -> bool {
        self.pending() < OUTPUT_MARK
    }

    /// Returns whether the client has left so much unread that its frames must not be read.
    pub fn is_clogged(&self) -> bool {
        self.pending() >= ANSWER_MARK
    }

    /// Adds a control frame and returns whether it could be encoded. One that cannot is too large;
    /// callers bound their messages, so none is lost.
    pub fn control<T: Serialize>(&mut self, kind: Kind, stream: u32, message: &T) -> bool {
        self.awaited = true;
        encode(&mut self.buffer, kind, stream, message).is_ok()
    }

    pub fn credit(&mut self, stream: u32, channel: Channel, bytes: u32, end: bool) {
        self.awaited = true;
        self.buffer.extend_from_slice(&frame::credit_frame(stream, channel, bytes, end));
    }

    /// Adds a data frame.
    pub fn data(&mut self, stream: u32, channel: Channel, bytes: &[u8], end: bool) {
        self.awaited = true;
        let flags = channel.bits() | if end { END } else { 0 };
        let header = Header::new(Kind::Data, stream, flags, bytes.len());
        self.buffer.extend_from_slice(&header.to_bytes());
        self.buffer.extend_from_slice(bytes);
    }

    /// Adds a data frame with the bytes of one read of `fd`; nothing at its end.
    pub fn data_from(
        &mut self,
        stream: u32,
        channel: Channel,
        fd: &OwnedFd,
        most: usize,
    ) -> io::Result<usize> {
        let start = self.buffer.len();
        self.buffer.extend_from_slice(&[0; HEADER_LEN]);
        let read = sys::read_onto(fd, &mut self.buffer, most);
        match read {
            Ok(count) if count > 0 => {
                self.awaited = true;
                let header = Header::new(Kind::Data, stream, channel.bits(), count).to_bytes();
                self.buffer[start..start + HEADER_LEN].copy_from_slice(&header);
            }
            _ => self.buffer.truncate(start),
        }
        read
    }

    /// Sends as much as the socket accepts, and returns whether all is sent.
    pub fn flush(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        while !self.is_empty() {
            match sys::write_once(socket, &self.buffer[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.buffer.drain(..self.sent);
                    self.sent = 0;
                    return Ok(false);
                }
                Err(e) => return Err(e),
            }
        }
        self.buffer.clear();
        self.buffer.shrink_to(KEEP);
        (self.sent, self.awaited, self.due) = (0, false, None);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn frame_that_can_wait_goes_with_the_next_that_cannot() {
        let mut out = Outbox::default();
        out.end_unhurried(1, Channel::Output);
        assert!(!out.is_due() && !out.is_empty());
        out.data(1, Channel::Error, b"x", false);
        assert!(out.is_due());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        assert!(out.flush(&ours.into()).unwrap());
        let mut both = Vec::new();
        theirs.read_to_end(&mut both).unwrap();
        assert_eq!(both.len(), 2 * HEADER_LEN + 1);
        assert!(out.due().is_none());
    }

    #[test]
    fn frame_that_can_wait_does_not_for_ever() {
        let mut out = Outbox::default();
        out.end_unhurried(1, Channel::Output);
        let due = out.due().unwrap();
        assert!(due <= Instant::now() + LINGER);
        std::thread::sleep(LINGER);
        assert!(out.is_due());
    }
}
