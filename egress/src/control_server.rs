//! The sockets of control clients: lines in, lines out, with bounds on both.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use crate::control;
use crate::gateway::Gateway;
use crate::sys::{Interest, Poller};
use crate::token::Token;

const CLIENTS_MAX: usize = 8;
/// The longest request: a policy of as many rules as are allowed.
const LINE_MAX: usize = 512 << 10;
// A client that does not read its answers is dropped.
const OUTPUT_MAX: usize = 1 << 20;
/// The time for the rest of a line, or for taking an answer.
const LINE_TIME: Duration = Duration::from_secs(10);

/// The listener and its clients.
#[derive(Debug)]
pub struct ControlServer {
    listener: UnixListener,
    clients: HashMap<u32, Client>,
    last: u32,
}

#[derive(Debug)]
struct Client {
    stream: UnixStream,
    input: Vec<u8>,
    output: Vec<u8>,
    interest: Interest,
    deadline: Option<Instant>,
}

impl ControlServer {
    pub fn new(listener: UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener, clients: HashMap::new(), last: 0 })
    }

    pub fn watch(&self, poller: &Poller) -> io::Result<()> {
        let reading = Interest { readable: true, writable: false };
        poller.watch(self.listener.as_fd(), Token::Control, Interest::default(), reading)
    }

    /// Returns the time of the next call to `expire`.
    pub fn deadline(&self) -> Option<Instant> {
        self.clients.values().filter_map(|client| client.deadline).min()
    }

    /// Drops the clients that have kept others waiting.
    pub fn expire(&mut self, now: Instant) {
        self.clients.retain(|_, client| client.deadline.is_none_or(|deadline| deadline > now));
    }

    /// Serves an event of the listener or a client.
    pub fn serve(&mut self, token: Token, gateway: &mut Gateway, now: Instant) {
        match token {
            Token::Control => self.accept(gateway.poller()),
            Token::Client(number) => {
                let Some(client) = self.clients.get_mut(&number) else { return };
                let done = client.serve(gateway, now);
                let watched = done.and_then(|()| client.watch(gateway.poller(), number));
                if watched.is_err() {
                    self.clients.remove(&number);
                }
            }
            _ => {}
        }
    }

    fn accept(&mut self, poller: &Poller) {
        let Ok((stream, _)) = self.listener.accept() else { return };
        // A client too many is closed at once: its next line finds no reader.
        if self.clients.len() >= CLIENTS_MAX || stream.set_nonblocking(true).is_err() {
            return;
        }
        self.last = self.last.wrapping_add(1);
        let (input, output, interest) = (Vec::new(), Vec::new(), Interest::default());
        let mut client = Client { stream, input, output, interest, deadline: None };
        if client.watch(poller, self.last).is_ok() {
            self.clients.insert(self.last, client);
        }
    }
}

impl Client {
    /// Reads requests and writes answers. Fails if the client is to be dropped.
    fn serve(&mut self, gateway: &mut Gateway, now: Instant) -> io::Result<()> {
        let mut part = [0; 16 << 10];
        // One read in each turn: a client that sends without end must not keep the guest waiting.
        match self.stream.read(&mut part) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => self.input.extend_from_slice(&part[..len]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        while let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.input.drain(..=end).collect();
            self.output.extend(control::answer(&line, gateway).into_bytes());
            self.output.push(b'\n');
        }
        if self.input.len() > LINE_MAX || self.output.len() > OUTPUT_MAX {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(len) => drop(self.output.drain(..len)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let waits = !self.input.is_empty() || !self.output.is_empty();
        self.deadline = waits.then(|| self.deadline.unwrap_or(now + LINE_TIME));
        Ok(())
    }

    fn watch(&mut self, poller: &Poller, number: u32) -> io::Result<()> {
        let interest = Interest { readable: true, writable: !self.output.is_empty() };
        let token = Token::Client(number);
        poller.watch(self.stream.as_fd(), token, self.interest, interest)?;
        self.interest = interest;
        Ok(())
    }
}
