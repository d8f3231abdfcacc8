//! The API socket: several clients at once, none of which can make another one wait.
//!
//! Nothing here blocks. The owner asks what to poll for, says what was ready, gets whole requests and gives
//! answers back. A client that is slow, silent or gone costs a buffer and a place, and both have an end.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use super::http::{self, Answer, Parsed, Refusal, Request};
use crate::sys::poll::{Ready, Want};

/// A request must be here, and an answer taken, this long after its first byte.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// More than that many clients are sent away.
pub const CLIENTS_MAX: usize = 200;
/// What is read of one client at a time.
const CHUNK: usize = 16 << 10;

/// Which client a request came from, and an answer goes to.
pub type ClientId = u64;

pub struct Server {
    listener: UnixListener,
    body_max: usize,
    clients: BTreeMap<ClientId, Client>,
    next: ClientId,
}

struct Client {
    stream: UnixStream,
    received: Vec<u8>,
    unsent: Vec<u8>,
    /// A request of it is being carried out.
    busy: bool,
    /// It is to be closed once everything is sent.
    last: bool,
    /// It will send nothing more, and may still listen.
    ended: bool,
    told_to_continue: bool,
    /// When what is under way is over.
    deadline: Option<Instant>,
    /// When it last said or took something, by count.
    turn: u64,
}

impl Server {
    /// Listens at a path that nothing is at.
    pub fn bind(path: &Path, body_max: usize) -> io::Result<Self> {
        let listener = pvmm::listen_privately(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, body_max, clients: BTreeMap::new(), next: 0 })
    }

    /// What to wait for.
    pub fn wants(&self) -> Vec<(BorrowedFd<'_>, Want)> {
        let clients = self.clients.values().map(|client| (client.stream.as_fd(), client.want()));
        std::iter::once((self.listener.as_fd(), Want::Read)).chain(clients).collect()
    }

    /// When a client has had its time, at the earliest.
    pub fn deadline(&self) -> Option<Instant> {
        self.clients.values().filter_map(|client| client.deadline).min()
    }

    /// Moves bytes, as far as they move: `ready` answers `wants`. Returns the requests that are whole.
    pub fn advance(&mut self, ready: &[Ready], now: Instant) -> Vec<(ClientId, Request)> {
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

    /// Answers a request. The client may be gone; then nobody is told.
    pub fn answer(&mut self, id: ClientId, answer: &Answer) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.busy = false;
        client.last |= answer.close;
        let close = client.last || answer.close;
        client.unsent.extend(Answer { close, ..answer.clone() }.bytes());
        client.deadline = Some(Instant::now() + PATIENCE);
        self.send(id);
    }

    /// Requests that came together with one that has been answered.
    pub fn whole_requests(&mut self, now: Instant) -> Vec<(ClientId, Request)> {
        let mut whole = Vec::new();
        let ids: Vec<ClientId> = self.clients.keys().copied().collect();
        for id in ids {
            if let Some(request) = self.take_request(id, now) {
                whole.push((id, request));
            }
        }
        whole
    }

    /// Sends what is left to send, for a process that is about to end.
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
                // As much as its buffer takes; then it is gone.
                let _ = (&stream).write_all(&answer.bytes());
                continue;
            }
            let id = self.next;
            self.next += 1;
            self.clients.insert(id, Client::new(stream, id));
        }
    }

    /// Makes room by closing the connection that has been quiet for longest.
    fn end_an_idle_one(&mut self) -> bool {
        let idle = self.clients.iter().filter(|(_, client)| client.is_idle());
        let longest = idle.min_by_key(|(_, client)| client.turn).map(|(id, _)| *id);
        longest.is_some_and(|id| self.clients.remove(&id).is_some())
    }

    fn serve(&mut self, id: ClientId, ready: Ready, now: Instant) {
        let turn = self.next;
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.turn = if ready.read { turn } else { client.turn };
        let broken = match ready.read && client.want() == Want::Read {
            true => client.receive(now, self.body_max).is_err(),
            // What it asked for is done all the same.
            false => ready.gone,
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

    fn take_request(&mut self, id: ClientId, now: Instant) -> Option<Request> {
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
                // Nobody will send the rest.
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
            // Its next request waits where it is until this one is answered.
            (true, true) => Want::Nothing,
        }
    }

    fn is_idle(&self) -> bool {
        !self.busy && self.received.is_empty() && self.unsent.is_empty()
    }

    /// Whether there is nothing more to expect of it.
    fn is_over(&self) -> bool {
        !self.busy
            && self.unsent.is_empty()
            && (self.last || self.ended && self.received.is_empty())
    }

    /// Takes what there is, up to one request more than is being worked on.
    fn receive(&mut self, now: Instant, body_max: usize) -> io::Result<()> {
        let mut chunk = [0; CHUNK];
        // A head that fits and a body that fits; what is more waits in the socket.
        while self.received.len() < body_max + 2 * CHUNK {
            match self.stream.read(&mut chunk) {
                Ok(0) if self.received.is_empty() => {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(0) => {
                    // It may have closed only its own direction, and still listen.
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
        // Taken; what the client sends next has its own time.
        self.deadline = None;
        Ok(())
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
