//! What a connection has to send: frames one after another in one buffer with a bound.
//! Pipes are read straight into it, so that output is copied once on its way to the socket.

use std::io;
use std::os::fd::OwnedFd;

use pvmm_guest_agent::encode;
use pvmm_guest_agent::frame::{self, Channel, END, HEADER_LEN, Header, Kind};
use serde::Serialize;

use crate::sys;

/// Above this, no more output is read from pipes.
const OUTPUT_MARK: usize = 128 << 10;
/// Above this, the client's own frames are not read either: each may need an answer.
const ANSWER_MARK: usize = 256 << 10;
/// An empty buffer keeps no more than this.
const KEEP: usize = 256 << 10;

/// Frames waiting to be sent.
#[derive(Default)]
pub struct Outbox {
    buffer: Vec<u8>,
    sent: usize,
}

impl Outbox {
    fn pending(&self) -> usize {
        self.buffer.len() - self.sent
    }

    pub fn is_empty(&self) -> bool {
        self.pending() == 0
    }

    /// Whether output may be added.
    pub fn has_room(&self) -> bool {
        self.pending() < OUTPUT_MARK
    }

    /// Whether the client has left so much unread that it must not be listened to.
    pub fn is_clogged(&self) -> bool {
        self.pending() >= ANSWER_MARK
    }

    /// Adds a control frame. One that cannot be encoded is too large: the caller bounds what it
    /// says, so nothing is lost by leaving it out.
    pub fn control<T: Serialize>(&mut self, kind: Kind, stream: u32, message: &T) -> bool {
        encode(&mut self.buffer, kind, stream, message).is_ok()
    }

    pub fn credit(&mut self, stream: u32, channel: Channel, bytes: u32, end: bool) {
        self.buffer.extend_from_slice(&frame::credit_frame(stream, channel, bytes, end));
    }

    /// Adds a data frame.
    pub fn data(&mut self, stream: u32, channel: Channel, bytes: &[u8], end: bool) {
        let flags = channel.bits() | if end { END } else { 0 };
        let header = Header::new(Kind::Data, stream, flags, bytes.len());
        self.buffer.extend_from_slice(&header.to_bytes());
        self.buffer.extend_from_slice(bytes);
    }

    /// Adds a data frame of what one read of `fd` gives; nothing at its end.
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
                let header = Header::new(Kind::Data, stream, channel.bits(), count).to_bytes();
                self.buffer[start..start + HEADER_LEN].copy_from_slice(&header);
            }
            _ => self.buffer.truncate(start),
        }
        read
    }

    /// Sends as much as the socket takes; whether all is sent.
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
        self.sent = 0;
        Ok(true)
    }
}
