//! A TLS connection to a host with secrets: ended here, its requests rewritten, and made again.
//!
//! Towards the guest this process shows a certificate of the sandbox's own authority; towards the
//! host it is a client that verifies the host's certificate. Nothing of a request leaves before
//! that has succeeded.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};

use rustls::{ClientConnection, ServerConnection};
use smoltcp::socket::tcp::Socket;

use crate::policy::Denial;
use crate::requests::{Refusal, Requests};
use crate::tls::{TlsError, TlsSides};

/// The most plain bytes that wait in one direction.
const WAITING_MAX: usize = 64 << 10;
const PART: usize = 16 << 10;

/// The host's end of a connection, as the connection knows it.
pub struct Far<'a> {
    pub stream: &'a mut TcpStream,
    pub readable: &'a mut bool,
    pub writable: &'a mut bool,
    pub ended: &'a mut bool,
}

/// The result of a turn.
#[derive(Debug, Default)]
pub struct Pumped {
    pub bytes_out: u64,
    pub bytes_in: u64,
    /// A side is gone, and the guest is to be told by a reset.
    pub broken: bool,
    /// Newly refused; the guest is being told, and the host's connection is over.
    pub refused: Option<Denial>,
}

/// One intercepted connection.
#[derive(Debug)]
pub struct Interception {
    guest: ServerConnection,
    host: ClientConnection,
    requests: Requests,
    /// Plain bytes that TLS has not taken yet.
    to_host: Vec<u8>,
    to_guest: Vec<u8>,
    guest_ended: bool,
    host_ended: bool,
    /// The host said in TLS that it has ended, so the guest may believe it.
    host_said_end: bool,
    told_host: bool,
    /// The guest has got bytes of the host.
    answered: bool,
    /// The guest gets an answer of this process, and then the end.
    refused: bool,
    /// The last turn ended before everything was done.
    pub has_more: bool,
}

impl Interception {
    pub fn new(sides: &TlsSides, name: &str, requests: Requests) -> Result<Self, TlsError> {
        let (mut guest, mut host) = sides.connect(name)?;
        guest.set_buffer_limit(Some(WAITING_MAX));
        host.set_buffer_limit(Some(WAITING_MAX));
        Ok(Self {
            guest,
            host,
            requests,
            to_host: Vec::new(),
            to_guest: Vec::new(),
            guest_ended: false,
            host_ended: false,
            host_said_end: false,
            told_host: false,
            answered: false,
            refused: false,
            // The hello of this side is to be sent.
            has_more: true,
        })
    }

    /// Returns whether bytes of the host could be used now.
    pub fn wants_host(&self) -> bool {
        !self.refused && !self.host_ended && self.host.wants_read() && self.to_guest.is_empty()
    }

    /// Moves what can be moved without waiting, up to about `max` bytes.
    pub fn pump(&mut self, guest: &mut Socket<'_>, mut far: Option<Far<'_>>, max: u64) -> Pumped {
        let mut pumped = Pumped::default();
        self.has_more = false;
        loop {
            let mut moved = self.read_guest(guest, &mut pumped);
            if let Err(refusal) = self.forward_requests() {
                self.refuse(Denial::RequestRefused, refusal.0, &mut pumped);
            }
            if let Some(far) = &mut far
                && !self.refused
            {
                moved |= self.write_host(far, &mut pumped);
                moved |= self.read_host(far, &mut pumped);
                self.end_host(far);
            }
            self.forward_answers();
            moved |= self.write_guest(guest);
            self.end_guest(guest);
            if pumped.broken || !moved {
                return pumped;
            }
            if pumped.bytes_out + pumped.bytes_in >= max {
                self.has_more = true;
                return pumped;
            }
        }
    }

    fn read_guest(&mut self, socket: &mut Socket<'_>, pumped: &mut Pumped) -> bool {
        if !socket.can_recv() {
            // A guest that has closed without saying so in TLS has closed all the same.
            self.guest_ended |= !socket.may_recv();
            return false;
        }
        if !self.guest.wants_read() {
            return false;
        }
        let guest = &mut self.guest;
        let read = socket.recv(|bytes| match guest.read_tls(&mut &*bytes) {
            Ok(len) => (len, Ok(len)),
            Err(error) => (0, Err(error)),
        });
        let Ok(Ok(len)) = read else {
            pumped.broken = true;
            return false;
        };
        pumped.bytes_out += len as u64;
        if self.guest.process_new_packets().is_err() {
            // The alert is worth one try.
            self.write_guest(socket);
            pumped.broken = true;
        }
        len > 0
    }

    /// Takes plain bytes of the guest through the rewriting.
    fn forward_requests(&mut self) -> Result<(), Refusal> {
        let mut part = [0; PART];
        while self.to_host.len() < WAITING_MAX {
            match self.guest.reader().read(&mut part) {
                Ok(0) => {
                    self.guest_ended = true;
                    break;
                }
                // A refused client may go on sending; nobody listens.
                Ok(_) if self.refused => {}
                Ok(len) => self.requests.push(&part[..len], &mut self.to_host)?,
                Err(_) => break,
            }
        }
        give(&mut self.to_host, &mut self.host.writer());
        Ok(())
    }

    fn write_host(&mut self, far: &mut Far<'_>, pumped: &mut Pumped) -> bool {
        let mut moved = false;
        while *far.writable && self.host.wants_write() {
            match self.host.write_tls(far.stream) {
                Ok(len) => moved |= len > 0,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => *far.writable = false,
                Err(_) => {
                    pumped.broken = true;
                    break;
                }
            }
        }
        moved
    }

    fn read_host(&mut self, far: &mut Far<'_>, pumped: &mut Pumped) -> bool {
        if !*far.readable || *far.ended || !self.wants_host() {
            return false;
        }
        match self.host.read_tls(far.stream) {
            Ok(0) => {
                (*far.ended, self.host_ended) = (true, true);
                if self.host.is_handshaking() {
                    self.refuse(Denial::ServerTls, "the server ended TLS", pumped);
                }
                true
            }
            Ok(len) => {
                pumped.bytes_in += len as u64;
                if let Err(error) = self.host.process_new_packets() {
                    let _ = self.host.write_tls(far.stream);
                    self.refuse(Denial::ServerTls, &error.to_string(), pumped);
                }
                true
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                *far.readable = false;
                false
            }
            Err(_) => {
                pumped.broken = true;
                false
            }
        }
    }

    fn forward_answers(&mut self) {
        let mut part = [0; PART];
        while !self.refused && self.to_guest.len() < WAITING_MAX {
            match self.host.reader().read(&mut part) {
                Ok(0) => {
                    (self.host_ended, self.host_said_end) = (true, true);
                    break;
                }
                Ok(len) => {
                    self.answered = true;
                    self.to_guest.extend_from_slice(&part[..len]);
                }
                Err(_) => break,
            }
            give(&mut self.to_guest, &mut self.guest.writer());
        }
        give(&mut self.to_guest, &mut self.guest.writer());
    }

    fn write_guest(&mut self, socket: &mut Socket<'_>) -> bool {
        let mut moved = false;
        while self.guest.wants_write() && socket.can_send() {
            let guest = &mut self.guest;
            let wrote = socket.send(|mut room| {
                let len = guest.write_tls(&mut room).unwrap_or(0);
                (len, len)
            });
            match wrote {
                Ok(1..) => moved = true,
                _ => break,
            }
        }
        moved
    }

    /// Tells the host that the guest has nothing more to say.
    fn end_host(&mut self, far: &mut Far<'_>) {
        if !self.guest_ended
            || self.told_host
            || !self.to_host.is_empty()
            || self.host.is_handshaking()
        {
            return;
        }
        self.host.send_close_notify();
        let _ = self.host.write_tls(far.stream);
        if !self.host.wants_write() {
            self.told_host = true;
            // The host may have closed already; then there is nobody to tell.
            let _ = far.stream.shutdown(Shutdown::Write);
        }
    }

    /// Ends the connection with the guest once it has got everything.
    fn end_guest(&mut self, socket: &mut Socket<'_>) {
        let over = self.refused || self.host_ended;
        // An answer to a guest that is still in its handshake waits for the end of that.
        let greeted = !self.guest.is_handshaking() || self.guest_ended;
        if !over || !greeted || !self.to_guest.is_empty() {
            return;
        }
        if self.refused || self.host_said_end {
            self.guest.send_close_notify();
            self.write_guest(socket);
        }
        if !self.guest.wants_write() {
            socket.close();
        }
    }

    /// Ends the connection with an answer that says why, if the guest has got none yet.
    fn refuse(&mut self, denial: Denial, why: &str, pumped: &mut Pumped) {
        if self.refused {
            return;
        }
        self.refused = true;
        pumped.refused = Some(denial);
        self.to_host.clear();
        if !self.answered {
            let status = match denial {
                Denial::ServerTls => "502 Bad Gateway",
                _ => "400 Bad Request",
            };
            let text = format!("pvmm: {}: {why}\n", denial.explain());
            let len = text.len();
            self.to_guest = format!(
                "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len}\r\n\
                 Connection: close\r\n\r\n{text}"
            )
            .into_bytes();
            give(&mut self.to_guest, &mut self.guest.writer());
        }
    }
}

/// Gives waiting bytes to TLS, as many as it takes.
fn give(waiting: &mut Vec<u8>, writer: &mut impl Write) {
    while !waiting.is_empty() {
        match writer.write(waiting) {
            Ok(len @ 1..) => drop(waiting.drain(..len)),
            _ => break,
        }
    }
}
