//! A TCP connection to a port inside the guest, made by its agent: no guest network is needed.
//! The two directions end separately, as those of a socket do.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::CONNECT_TIME;
use pvmm_guest_agent::message::{Connect, Outcome, Request};

use super::error::AgentError;
use super::stream::{Received, StreamRef};
use super::{Agent, Event};

/// What the way to the agent may add to the time it takes to connect.
const MARGIN: Duration = Duration::from_secs(20);

impl Agent {
    /// Connects to a port that something in the guest listens on, at 127.0.0.1 or ::1. A port
    /// where nobody listens is `Refused` with ECONNREFUSED.
    pub fn connect_tcp(&self, port: u16) -> Result<GuestTcp, AgentError> {
        if port == 0 {
            return Err(AgentError::InvalidRequest { field: "port", why: "is 0" });
        }
        let stream = self.open(&Request::Connect(Connect { port }))?;
        let deadline = Instant::now() + CONNECT_TIME + MARGIN;
        if stream.started(Some(deadline))?.is_some() {
            let held = Arc::new(Held(stream));
            let reader = GuestTcpReader {
                held: Arc::clone(&held),
                chunk: Vec::new(),
                taken: 0,
                ended: false,
            };
            return Ok(GuestTcp { reader, writer: GuestTcpWriter { held } });
        }
        // It is over without having begun, or was not in time.
        match stream.next(Some(Instant::now()))? {
            Some(Event::Done(Outcome::Failed(failure))) => Err(failure.into()),
            Some(_) => Err(AgentError::WrongAnswer),
            None => {
                stream.cancel();
                Err(AgentError::Overdue)
            }
        }
    }
}

/// A connection to a port in the guest. Dropping it, or both its halves, closes it.
pub struct GuestTcp {
    reader: GuestTcpReader,
    writer: GuestTcpWriter,
}

/// What the guest sends.
pub struct GuestTcpReader {
    held: Arc<Held>,
    chunk: Vec<u8>,
    taken: usize,
    ended: bool,
}

/// What goes to the guest.
pub struct GuestTcpWriter {
    held: Arc<Held>,
}

/// Closes the connection when the last half goes.
struct Held(StreamRef);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl GuestTcp {
    /// The two directions, for two threads.
    pub fn split(self) -> (GuestTcpReader, GuestTcpWriter) {
        (self.reader, self.writer)
    }

    /// Tells the guest that nothing more comes; reading goes on.
    pub fn shutdown_write(&self) -> io::Result<()> {
        self.writer.shutdown()
    }
}

impl Read for GuestTcp {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.reader.read(buffer)
    }
}

impl Write for GuestTcp {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl GuestTcpReader {
    /// The next bytes as they came, without a copy; empty at the end.
    pub fn next_chunk(&mut self) -> io::Result<Vec<u8>> {
        if self.taken < self.chunk.len() {
            return Ok(self.chunk.split_off(std::mem::take(&mut self.taken)));
        }
        if self.ended {
            return Ok(Vec::new());
        }
        match self.held.0.next_output(None).map_err(lost)? {
            Some(Received::Bytes(bytes)) => Ok(bytes),
            Some(Received::Ended | Received::Done(Outcome::Ok(_))) | None => {
                self.ended = true;
                Ok(Vec::new())
            }
            Some(Received::Done(Outcome::Failed(failure))) => {
                self.ended = true;
                Err(io::Error::new(io::ErrorKind::ConnectionReset, AgentError::from(failure)))
            }
        }
    }
}

impl Read for GuestTcpReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        if self.taken == self.chunk.len() {
            (self.taken, self.chunk) = (0, Vec::new());
            self.chunk = self.next_chunk()?;
        }
        let count = buffer.len().min(self.chunk.len() - self.taken);
        buffer[..count].copy_from_slice(&self.chunk[self.taken..self.taken + count]);
        self.taken += count;
        Ok(count)
    }
}

impl GuestTcpWriter {
    /// Tells the guest that nothing more comes.
    pub fn shutdown(&self) -> io::Result<()> {
        self.held.0.end_input().map_err(lost)
    }

    /// Closes the connection in both directions, also for the other half.
    pub fn close(&self) {
        self.held.0.cancel();
    }
}

impl Write for &GuestTcpWriter {
    /// Waits while the guest does not read; fails with `BrokenPipe` once it never will.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        match self.held.0.send_input(bytes, None).map_err(lost)? {
            Some(0) | None => Err(io::ErrorKind::BrokenPipe.into()),
            Some(count) => Ok(count),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Write for GuestTcpWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn lost(error: AgentError) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, error)
}
