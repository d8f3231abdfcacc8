//! TCP connections to ports inside the guest, made by its agent: no guest network is needed.
//!
//! The two directions end separately, as those of a socket do.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::CONNECT_TIME;
use pvmm_guest_agent::message::{Connect, Outcome, Request};

use super::error::AgentError;
use super::stream::{Received, StreamRef};
use super::{Agent, Event};

/// Time that the connection to the agent may add to the guest's own limit.
const MARGIN: Duration = Duration::from_secs(20);

impl Agent {
    /// Connects to a listening port in the guest, at 127.0.0.1 or ::1. Without a listener this
    /// fails with `Refused` and ECONNREFUSED.
    pub fn connect_tcp(&self, port: u16) -> Result<GuestTcp, AgentError> {
        if port == 0 {
            return Err(AgentError::InvalidRequest { field: "port", why: "is 0" });
        }
        let stream = self.open(&Request::Connect(Connect { port }))?;
        let deadline = Instant::now() + CONNECT_TIME + MARGIN;
        if stream.started(Some(deadline))?.is_some() {
            let connection = Arc::new(OpenConnection(stream));
            let reader = GuestTcpReader {
                connection: Arc::clone(&connection),
                chunk: Vec::new(),
                taken: 0,
                ended: false,
            };
            return Ok(GuestTcp { reader, writer: GuestTcpWriter { connection } });
        }
        // The stream ended before it began, or the deadline passed.
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

/// The receiving half of a connection.
pub struct GuestTcpReader {
    connection: Arc<OpenConnection>,
    chunk: Vec<u8>,
    taken: usize,
    ended: bool,
}

/// The sending half of a connection.
pub struct GuestTcpWriter {
    connection: Arc<OpenConnection>,
}

/// Closes the connection when the last half is dropped.
struct OpenConnection(StreamRef);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl GuestTcp {
    /// Splits the connection into its two directions, for two threads.
    pub fn split(self) -> (GuestTcpReader, GuestTcpWriter) {
        (self.reader, self.writer)
    }

    /// Ends the sending direction; reading goes on.
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
    /// Returns the next bytes as they were received, without a copy; empty at the end.
    pub fn next_chunk(&mut self) -> io::Result<Vec<u8>> {
        if self.taken < self.chunk.len() {
            return Ok(self.chunk.split_off(std::mem::take(&mut self.taken)));
        }
        if self.ended {
            return Ok(Vec::new());
        }
        match self.connection.0.next_output(None).map_err(lost)? {
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
    /// Ends the sending direction.
    pub fn shutdown(&self) -> io::Result<()> {
        self.connection.0.end_input().map_err(lost)
    }

    /// Closes the connection in both directions, also for the receiving half.
    pub fn close(&self) {
        self.connection.0.cancel();
    }
}

impl Write for &GuestTcpWriter {
    /// Waits while the guest does not read; fails with `BrokenPipe` once it never will.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        match self.connection.0.send_input(bytes, None).map_err(lost)? {
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
