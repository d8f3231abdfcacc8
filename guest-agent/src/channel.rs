//! The two ends of a stream's bytes: a `Source` reads a pipe for the client, a `Sink` fills one.
//! Processes and file work look the same from here, so there is one flow control for both.

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

/// Whether something is left to do without waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    More,
    Waiting,
}

/// Reads a pipe and sends what it gives.
pub struct Source {
    pub channel: Channel,
    fd: Option<OwnedFd>,
    readable: bool,
    hung_up: bool,
    window: SendWindow,
    /// Bytes of the head still to be sent; without a limit there is no end of them.
    head_left: u64,
    /// What comes after the head.
    tail: Option<Tail>,
    /// The tail on its way out, once the pipe has ended.
    last: Option<Vec<u8>>,
    count: OutputCount,
    /// End after this many bytes more, whoever still holds the pipe.
    stop_after: Option<u64>,
    /// Why reading failed, if it did; the end is then not announced as one.
    errno: Option<i32>,
    ended: bool,
    /// Its end is soon followed by other news.
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

    /// An output of a process: it mostly ends because the process does.
    pub fn of_process(channel: Channel, fd: OwnedFd, limit: Option<OutputLimit>) -> Self {
        Self { end_can_wait: true, ..Self::new(channel, fd, limit) }
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    pub fn count(&self) -> OutputCount {
        self.count
    }

    /// Why reading failed, if it did.
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

    /// Takes only what is in the pipe now; says whether somebody still holds the other end.
    pub fn stop_soon(&mut self) -> bool {
        let Some(fd) = &self.fd else { return false };
        self.stop_after = Some(sys::waiting_bytes(fd));
        self.readable = true;
        !self.hung_up
    }

    /// Does one read's worth of work.
    pub fn pump(&mut self, out: &mut Outbox, stream: u32, scratch: &mut Vec<u8>) -> Step {
        if self.ended {
            return Step::Waiting;
        }
        let Some(fd) = self.fd.take() else { return self.send_tail(out, stream) };
        if !self.readable {
            self.fd = Some(fd);
            return Step::Waiting;
        }
        let most = self.stop_after.unwrap_or(u64::MAX).min(MAX_DATA as u64);
        if most == 0 {
            return self.close(out, stream);
        }
        let (most, read) = if self.head_left > 0 {
            let most = most.min(self.head_left).min(self.window.left() as u64) as usize;
            if most == 0 || !out.has_room() {
                self.fd = Some(fd);
                return Step::Waiting;
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
                Step::Waiting
            }
            Ok(count) if count > 0 => {
                self.account(count as u64);
                // A short read has emptied the pipe; the next bytes make a new edge. An end that
                // was already announced does not, so then read on.
                self.readable = count == most || self.hung_up || self.stop_after.is_some();
                self.fd = Some(fd);
                if self.readable { Step::More } else { Step::Waiting }
            }
            Err(e) if e.raw_os_error() == Some(libc::ECONNRESET) => {
                self.errno = e.raw_os_error();
                self.ended = true;
                Step::Waiting
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

    fn close(&mut self, out: &mut Outbox, stream: u32) -> Step {
        if let Some(tail) = self.tail.take() {
            self.count.dropped = tail.forgotten();
            self.last = Some(tail.into_bytes());
        }
        self.send_tail(out, stream)
    }

    fn send_tail(&mut self, out: &mut Outbox, stream: u32) -> Step {
        while let Some(mut last) = self.last.take() {
            let count = last.len().min(self.window.left()).min(MAX_DATA);
            if last.is_empty() {
                break;
            }
            if count == 0 || !out.has_room() {
                self.last = Some(last);
                return Step::Waiting;
            }
            out.data(stream, self.channel, &last[..count], false);
            self.window.sent(count);
            last.drain(..count);
            self.last = Some(last);
        }
        match self.end_can_wait {
            true => out.end_unhurried(stream, self.channel),
            false => out.data(stream, self.channel, &[], true),
        }
        self.ended = true;
        Step::Waiting
    }
}

/// Takes the client's bytes and fills a pipe with them.
pub struct Sink {
    fd: Option<OwnedFd>,
    buffer: Vec<u8>,
    /// So much of the buffer is written.
    done: usize,
    writable: bool,
    /// The client has sent its last byte.
    ended: bool,
    /// The client has been told that nothing more is wanted.
    refused: bool,
    ending: Ending,
    window: ReceiveWindow,
    /// Raised when the pipe ends because the client ended it, and for no other reason.
    commit: Option<Arc<AtomicBool>>,
}

/// How what we write to learns that no more comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Close,
    /// Closing is not enough where reading goes on over the same socket.
    HalfClose,
    /// On a terminal the end is a key.
    Key(u8),
}

const CTRL_D: u8 = 4;

impl Sink {
    /// Our side of a terminal.
    pub fn terminal(fd: OwnedFd) -> Self {
        Self { ending: Ending::Key(CTRL_D), ..Self::new(fd, None) }
    }

    pub fn new(fd: OwnedFd, commit: Option<Arc<AtomicBool>>) -> Self {
        Self {
            fd: Some(fd),
            buffer: Vec::new(),
            done: 0,
            writable: true,
            ended: false,
            refused: false,
            ending: Ending::Close,
            window: ReceiveWindow::new(INPUT_WINDOW),
            commit,
        }
    }

    /// The way to whoever writes a file, who sets `committed` apart from an end for another reason.
    pub fn file(fd: OwnedFd, committed: Arc<AtomicBool>) -> Self {
        let mut sink = Self::new(fd, Some(committed));
        sink.window.grow_to(FILE_WINDOW);
        sink
    }

    /// A connected socket that is also read.
    pub fn socket(fd: OwnedFd) -> Self {
        Self { ending: Ending::HalfClose, ..Self::new(fd, None) }
    }

    /// Everything was written, or nothing more can be.
    pub fn is_closed(&self) -> bool {
        self.fd.is_none()
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    pub fn set_ready(&mut self) {
        self.writable = true;
    }

    /// Takes one data frame.
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

    /// Writes what is buffered, as far as the pipe takes it.
    pub fn pump(&mut self, out: &mut Outbox, stream: u32) {
        let mut buffer = std::mem::take(&mut self.buffer);
        self.done += self.write(&buffer[self.done..], out, stream);
        // What is left moves only when that is less than what has gone, so that
        // moving never costs more than writing did.
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
                (Some(fd), Ending::HalfClose) => sys::tcp::end_writing(&fd),
                (Some(fd), Ending::Key(key)) => drop(sys::write_once(&fd, &[key])),
                _ => {}
            }
        }
    }

    /// Writes and returns what is off our hands, which includes what nobody will read.
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
