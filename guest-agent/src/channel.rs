//! The two ends of a stream's bytes: a `Source` reads a pipe for the client, a `Sink` fills one.
//!
//! Processes and file work have one interface here, so there is one flow control for both.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::limits::{FILE_WINDOW, INPUT_WINDOW, MAX_DATA, OUTPUT_WINDOW};
use pvmm_guest_agent::message::{OutputCount, OutputLimit};
use pvmm_guest_agent::output::Tail;
use pvmm_guest_agent::window::{ReceiveWindow, SendWindow, WindowError};

use crate::outbox::Outbox;
use crate::sys;

/// Whether there is more to do without waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pumped {
    More,
    Waiting,
}

/// Reads a pipe and sends its bytes to the client.
pub struct Source {
    pub channel: Channel,
    fd: Option<OwnedFd>,
    readable: bool,
    hung_up: bool,
    window: SendWindow,
    /// Bytes of the head that are still to be sent; unbounded without a limit.
    head_left: u64,
    /// The bytes after the head.
    tail: Option<Tail>,
    /// The tail that is being sent, once the pipe has ended.
    last: Option<Vec<u8>>,
    count: OutputCount,
    /// End after this many more bytes, even if a process still holds the pipe.
    stop_after: Option<u64>,
    /// The error of a failed read; the channel's end is then not announced.
    errno: Option<i32>,
    ended: bool,
    /// The end may be sent late, because the outcome soon follows.
    end_can_wait: bool,
}

impl Source {
    pub fn new(channel: Channel, fd: OwnedFd, limit: Option<OutputLimit>) -> Self {
        Self {
            channel,
            fd: Some(fd),
            readable: false,
            hung_up: false,
            window: SendWindow::new(OUTPUT_WINDOW),
            head_left: limit.map_or(u64::MAX, |limit| limit.head),
            tail: limit.map(|limit| Tail::new(limit.tail as usize)),
            last: None,
            count: OutputCount::default(),
            stop_after: None,
            errno: None,
            ended: false,
            end_can_wait: false,
        }
    }

    /// Makes the source of a process's output, which mostly ends because the process does.
    pub fn of_process(channel: Channel, fd: OwnedFd, limit: Option<OutputLimit>) -> Self {
        Self { end_can_wait: true, ..Self::new(channel, fd, limit) }
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    pub fn count(&self) -> OutputCount {
        self.count
    }

    /// Returns the error of a failed read.
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }

    pub fn grant(&mut self, bytes: u32) -> Result<(), WindowError> {
        self.window.grant(bytes)
    }

    pub fn set_ready(&mut self, hung_up: bool) {
        self.readable = true;
        self.hung_up |= hung_up;
    }

    /// Stops after the bytes that are in the pipe now; returns whether a process still holds the
    /// other end.
    pub fn stop_soon(&mut self) -> bool {
        let Some(fd) = &self.fd else { return false };
        self.stop_after = Some(sys::waiting_bytes(fd));
        self.readable = true;
        !self.hung_up
    }

    /// Does the work of one read.
    pub fn pump(&mut self, out: &mut Outbox, stream: u32, scratch: &mut Vec<u8>) -> Pumped {
        if self.ended {
            return Pumped::Waiting;
        }
        let Some(fd) = self.fd.take() else { return self.send_tail(out, stream) };
        if !self.readable {
            self.fd = Some(fd);
            return Pumped::Waiting;
        }
        let most = self.stop_after.unwrap_or(u64::MAX).min(MAX_DATA as u64);
        if most == 0 {
            return self.close(out, stream);
        }
        let (most, read) = if self.head_left > 0 {
            let most = most.min(self.head_left).min(self.window.left() as u64) as usize;
            if most == 0 || !out.has_room() {
                self.fd = Some(fd);
                return Pumped::Waiting;
            }
            let read = out.data_from(stream, self.channel, &fd, most);
            let count = *read.as_ref().unwrap_or(&0);
            self.window.sent(count);
            if self.tail.is_some() {
                self.head_left -= count as u64;
            }
            (most, read)
        } else {
            scratch.clear();
            let read = sys::read_onto(&fd, scratch, most as usize);
            if let Some(tail) = &mut self.tail {
                tail.push(scratch);
            }
            (most as usize, read)
        };
        match read {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                if self.stop_after.is_some() {
                    return self.close(out, stream);
                }
                self.readable = false;
                self.fd = Some(fd);
                Pumped::Waiting
            }
            Ok(count) if count > 0 => {
                self.account(count as u64);
                // A short read has emptied the pipe; the next bytes make a new edge. An end that
                // was already announced does not, so then read on.
                self.readable = count == most || self.hung_up || self.stop_after.is_some();
                self.fd = Some(fd);
                if self.readable { Pumped::More } else { Pumped::Waiting }
            }
            Err(e) if e.raw_os_error() == Some(libc::ECONNRESET) => {
                self.errno = e.raw_os_error();
                self.ended = true;
                Pumped::Waiting
            }
            _ => self.close(out, stream),
        }
    }

    fn account(&mut self, count: u64) {
        self.count.total += count;
        if let Some(left) = &mut self.stop_after {
            *left = left.saturating_sub(count);
        }
    }

    fn close(&mut self, out: &mut Outbox, stream: u32) -> Pumped {
        if let Some(tail) = self.tail.take() {
            self.count.dropped = tail.forgotten();
            self.last = Some(tail.into_bytes());
        }
        self.send_tail(out, stream)
    }

    fn send_tail(&mut self, out: &mut Outbox, stream: u32) -> Pumped {
        while let Some(mut last) = self.last.take() {
            let count = last.len().min(self.window.left()).min(MAX_DATA);
            if last.is_empty() {
                break;
            }
            if count == 0 || !out.has_room() {
                self.last = Some(last);
                return Pumped::Waiting;
            }
            out.data(stream, self.channel, &last[..count], false);
            self.window.sent(count);
            last.drain(..count);
            self.last = Some(last);
        }
        if self.end_can_wait {
            out.end_unhurried(stream, self.channel)
        } else {
            out.data(stream, self.channel, &[], true)
        }
        self.ended = true;
        Pumped::Waiting
    }
}

/// Receives the client's bytes and fills a pipe with them.
pub struct Sink {
    fd: Option<OwnedFd>,
    buffer: Vec<u8>,
    /// How many bytes of the buffer are written.
    done: usize,
    writable: bool,
    /// The client has sent its last byte.
    ended: bool,
    /// The client has been notified that no more input is accepted.
    refused: bool,
    ending: InputEnd,
    window: ReceiveWindow,
    /// Set when the pipe ends because the client ended it, and for no other reason.
    commit: Option<Arc<AtomicBool>>,
}

/// How the end of the input is signalled to the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InputEnd {
    Close,
    /// Half-close: closing is not enough for a socket that is also read.
    HalfClose,
    /// A terminal reads the end as a key.
    Key(u8),
}

const CTRL_D: u8 = 4;

impl Sink {
    /// Makes the sink of a terminal.
    pub fn terminal(fd: OwnedFd) -> Self {
        Self { ending: InputEnd::Key(CTRL_D), ..Self::new(fd, None) }
    }

    pub fn new(fd: OwnedFd, commit: Option<Arc<AtomicBool>>) -> Self {
        Self {
            fd: Some(fd),
            buffer: Vec::new(),
            done: 0,
            writable: true,
            ended: false,
            refused: false,
            ending: InputEnd::Close,
            window: ReceiveWindow::new(INPUT_WINDOW),
            commit,
        }
    }

    /// Makes the sink of a file writer. `committed` is set when the client ended the input, and for
    /// no other end.
    pub fn file(fd: OwnedFd, committed: Arc<AtomicBool>) -> Self {
        let mut sink = Self::new(fd, Some(committed));
        sink.window.grow_to(FILE_WINDOW);
        sink
    }

    /// Makes the sink of a connected socket that is also read.
    pub fn socket(fd: OwnedFd) -> Self {
        Self { ending: InputEnd::HalfClose, ..Self::new(fd, None) }
    }

    /// Returns whether everything was written, or nothing more can be.
    pub fn is_closed(&self) -> bool {
        self.fd.is_none()
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    pub fn set_ready(&mut self) {
        self.writable = true;
    }

    /// Accepts one data frame.
    pub fn accept(
        &mut self,
        bytes: &[u8],
        end: bool,
        out: &mut Outbox,
        stream: u32,
    ) -> Result<(), WindowError> {
        self.window.received(bytes.len())?;
        self.ended |= end;
        let mut rest = bytes;
        if self.buffer.is_empty() {
            let count = self.write(rest, out, stream);
            rest = &rest[count..];
        }
        self.buffer.extend_from_slice(rest);
        self.pump(out, stream);
        Ok(())
    }

    /// Writes the buffered bytes, as far as the pipe accepts them.
    pub fn pump(&mut self, out: &mut Outbox, stream: u32) {
        let mut buffer = std::mem::take(&mut self.buffer);
        self.done += self.write(&buffer[self.done..], out, stream);
        // The rest is moved only when it is smaller than what was written, so that moving never
        // costs more than writing did.
        if self.done > buffer.len() / 2 {
            buffer.drain(..self.done);
            self.done = 0;
        }
        self.buffer = buffer;
        if self.ended && self.buffer.is_empty() {
            if let Some(commit) = &self.commit {
                commit.store(true, Ordering::Release);
            }
            match (self.fd.take(), self.ending) {
                (Some(fd), InputEnd::HalfClose) => sys::tcp::end_writing(&fd),
                (Some(fd), InputEnd::Key(key)) => drop(sys::write_once(&fd, &[key])),
                _ => {}
            }
        }
    }

    /// Writes bytes and returns how many are done, including bytes that nobody will read.
    fn write(&mut self, bytes: &[u8], out: &mut Outbox, stream: u32) -> usize {
        let mut done = 0;
        while let Some(fd) = &self.fd {
            if done == bytes.len() || !self.writable {
                break;
            }
            match sys::write_once(fd, &bytes[done..]) {
                Ok(count) => done += count,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(_) => self.fd = None,
            }
        }
        if self.fd.is_none() {
            done = bytes.len();
            if !self.refused && !self.ended {
                self.refused = true;
                out.credit(stream, Channel::Input, 0, true);
            }
        }
        if let Some(grant) = self.window.consumed(done) {
            out.credit(stream, Channel::Input, grant, false);
        }
        done
    }
}
