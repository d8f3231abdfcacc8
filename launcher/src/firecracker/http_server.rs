//! The API socket: several clients at once, none of which can block another.
//!
//! Nothing here blocks. The event loop gets the file descriptors to poll from `wants`, reports
//! which are ready to `advance`, gets complete requests back and passes answers in. A client that
//! is slow, silent or gone costs one buffer and one connection, and both are bounded.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use super::http::{self, Answer, HttpRequest, Parsed, Refusal};
use pvmm_sandbox::sys::poll::{Ready, Want};

/// How long a client may take to complete a request, from its first byte, and to read an answer.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// The most connections; further clients are refused.
pub const CLIENTS_MAX: usize = 200;
/// Bytes read from a client per system call.
const CHUNK: usize = 16 << 10;

/// Identifies the connection that a request came from and its answer goes to.
pub type ClientId = u64;

pub struct HttpServer {
    listener: UnixListener,
    body_max: usize,
    clients: BTreeMap<ClientId, Client>,
    next: ClientId,
}

struct Client {
    stream: UnixStream,
    received: Vec<u8>,
    unsent: Vec<u8>,
    /// A request of this client is being carried out.
    busy: bool,
    /// The connection is closed once `unsent` is sent.
    last: bool,
    /// The client has closed its sending direction, and may still read.
    ended: bool,
    told_to_continue: bool,
    /// When the current request or answer times out.
    deadline: Option<Instant>,
    /// The connection counter when the client last sent something.
    turn: u64,
}

impl HttpServer {
    /// Binds the socket at a path that must not exist.
    pub fn bind(path: &Path, body_max: usize) -> io::Result<Self> {
        let listener = pvmm::listen_privately(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, body_max, clients: BTreeMap::new(), next: 0 })
    }

    /// Returns the file descriptors to poll: the listener first, then every client.
    pub fn wants(&self) -> Vec<(BorrowedFd<'_>, Want)> {
        let clients = self.clients.values().map(|client| (client.stream.as_fd(), client.want()));
        std::iter::once((self.listener.as_fd(), Want::Read)).chain(clients).collect()
    }

    /// Returns the earliest deadline of any client.
    pub fn deadline(&self) -> Option<Instant> {
        self.clients.values().filter_map(|client| client.deadline).min()
    }

    /// Reads and writes as far as possible without blocking, and returns the complete requests.
    ///
    /// `ready` is the poll result for the list that `wants` returned.
    pub fn advance(&mut self, ready: &[Ready], now: Instant) -> Vec<(ClientId, HttpRequest)> {
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        for (id, ready) in ids.into_iter().zip(ready.iter().skip(1)) {
            self.serve(id, *ready, now);
        }
        if ready.first().is_some_and(|ready| ready.read) {
            self.accept();
        }
        self.end_overdue(now);
        self.whole_requests(now)
    }

    /// Sends the answer to a request; does nothing if the client is gone.
    pub fn answer(&mut self, id: ClientId, answer: &Answer) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.busy = false;
        client.last |= answer.close;
        let close = client.last || answer.close;
        client.unsent.extend(Answer { close, ..answer.clone() }.bytes());
        client.deadline = Some(Instant::now() + PATIENCE);
        self.send(id);
    }

    /// Returns complete requests that are already buffered, behind one that has been answered.
    pub fn whole_requests(&mut self, now: Instant) -> Vec<(ClientId, HttpRequest)> {
        let mut whole = Vec::new();
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        for id in ids {
            if let Some(request) = self.take_request(id, now) {
                whole.push((id, request));
            }
        }
        whole
    }

    /// Sends all pending answers, blocking at most `patience` per write; for a process about to
    /// end.
    pub fn flush(&mut self, patience: Duration) {
        for client in self.clients.values_mut() {
            let _ = client.stream.set_nonblocking(false);
            let _ = client.stream.set_write_timeout(Some(patience));
            let _ = client.stream.write_all(&client.unsent);
        }
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.clients.len() >= CLIENTS_MAX && !self.end_an_idle_one() {
                let message = "Too many open connections.".to_owned();
                let answer = Answer { close: true, ..Refusal { status: 503, message }.into() };
                // Best effort: the client gets what the socket buffer takes.
                let _ = (&stream).write_all(&answer.bytes());
                continue;
            }
            let id = self.next;
            self.next += 1;
            self.clients.insert(id, Client::new(stream, id));
        }
    }

    /// Makes room by closing the connection that has been idle for longest.
    fn end_an_idle_one(&mut self) -> bool {
        let idle = self.clients.iter().filter(|(_, client)| client.is_idle());
        let longest = idle.min_by_key(|(_, client)| client.turn).map(|(id, _)| *id);
        longest.is_some_and(|id| self.clients.remove(&id).is_some())
    }

    fn serve(&mut self, id: ClientId, ready: Ready, now: Instant) {
        let turn = self.next;
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.turn = if ready.read { turn } else { client.turn };
        let broken = if ready.read && client.want() == Want::Read {
            client.receive(now, self.body_max).is_err()
        } else {
            // A request of this client that is being carried out is completed anyway.
            ready.gone
        };
        if broken {
            self.clients.remove(&id);
        } else if ready.write {
            self.send(id);
        }
    }

    fn send(&mut self, id: ClientId) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        if client.send().is_err() || client.is_over() {
            self.clients.remove(&id);
        }
    }

    fn end_overdue(&mut self, now: Instant) {
        let overdue = |client: &Client| client.deadline.is_some_and(|deadline| deadline <= now);
        let ids: Vec<_> =
            self.clients.iter().filter(|(_, c)| overdue(c)).map(|(id, _)| *id).collect();
        for id in ids {
            let Some(mut client) = self.clients.remove(&id) else { continue };
            if client.unsent.is_empty() {
                let message =
                    format!("The request did not arrive within {} s.", PATIENCE.as_secs());
                let answer = Answer { close: true, ..Refusal { status: 408, message }.into() };
                client.unsent = answer.bytes();
                let _ = client.send();
            }
        }
    }

    fn take_request(&mut self, id: ClientId, now: Instant) -> Option<HttpRequest> {
        let body_max = self.body_max;
        let client = self.clients.get_mut(&id)?;
        if client.busy || client.received.is_empty() || !client.unsent.is_empty() {
            return None;
        }
        match http::parse(&client.received, body_max) {
            Ok(Parsed::Whole(request, len)) => {
                client.received.drain(..len);
                client.busy = true;
                client.told_to_continue = false;
                client.deadline = None;
                client.last |= request.close;
                Some(request)
            }
            Ok(Parsed::Incomplete { .. }) if client.ended => {
                // The rest of the request can no longer arrive.
                self.clients.remove(&id);
                None
            }
            Ok(Parsed::Incomplete { expects_continue }) => {
                client.deadline.get_or_insert(now + PATIENCE);
                if expects_continue && !client.told_to_continue {
                    client.told_to_continue = true;
                    client.unsent.extend(b"HTTP/1.1 100 Continue\r\n\r\n");
                    self.send(id);
                }
                None
            }
            Err(refusal) => {
                client.received.clear();
                client.busy = true;
                self.answer(id, &Answer { close: true, ..refusal.into() });
                None
            }
        }
    }
}

impl Client {
    fn new(stream: UnixStream, turn: u64) -> Self {
        Self {
            stream,
            received: Vec::new(),
            unsent: Vec::new(),
            busy: false,
            last: false,
            ended: false,
            told_to_continue: false,
            deadline: None,
            turn,
        }
    }

    fn want(&self) -> Want {
        match (self.unsent.is_empty(), self.busy || self.last || self.ended) {
            (false, _) => Want::Write,
            (true, false) => Want::Read,
            // The client's next request stays in the socket until this one is answered.
            (true, true) => Want::Nothing,
        }
    }

    fn is_idle(&self) -> bool {
        !self.busy && self.received.is_empty() && self.unsent.is_empty()
    }

    /// Whether the connection can be closed: nothing is left to read, carry out or send.
    fn is_over(&self) -> bool {
        !self.busy
            && self.unsent.is_empty()
            && (self.last || self.ended && self.received.is_empty())
    }

    /// Reads what the client has sent, bounded by one request beyond the one being carried out.
    fn receive(&mut self, now: Instant, body_max: usize) -> io::Result<()> {
        let mut chunk = [0; CHUNK];
        // Room for the largest head and body; the rest stays in the socket.
        while self.received.len() < body_max + 2 * CHUNK {
            match self.stream.read(&mut chunk) {
                Ok(0) if self.received.is_empty() => {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(0) => {
                    // The client may have closed only its sending direction.
                    self.ended = true;
                    break;
                }
                Ok(count) => {
                    self.received.extend_from_slice(&chunk[..count]);
                    self.deadline.get_or_insert(now + PATIENCE);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn send(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        // The answer is sent; the client's next request starts a new deadline.
        self.deadline = None;
        Ok(())
    }
}

#[cfg(test)]
#[path = "http_server_tests.rs"]
mod tests;
