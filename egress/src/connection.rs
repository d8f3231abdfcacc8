//! One TCP connection of the guest: accepted by smoltcp, judged, dialled by the host, and copied.
//!
//! The stages are: handshake with the guest → a name in its first bytes, where one must be shown →
//! an address from this process's own resolver → the host's connection → bytes in both directions.
//! Bytes of the guest stay in smoltcp's buffer until they are judged.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, SocketAddrV4, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use smoltcp::iface::SocketHandle;
use smoltcp::socket::tcp::{Socket, State};

use crate::counters::{Attempt, Counters};
use crate::hello::{self, Hello};
use crate::interception::{Far, Interception};
use crate::policy::{Denial, Policy, Port, Verdict};
use crate::requests::Requests;
use crate::secrets::Secrets;
use crate::sys::{self, Interest, Poller};
use crate::token::Token;

/// From the first segment to a judged name.
const HELLO_TIME: Duration = Duration::from_secs(10);
const RESOLVE_TIME: Duration = Duration::from_secs(8);
const DIAL_TIME: Duration = Duration::from_secs(10);
const DIALS_MAX: usize = 4;
/// For the guest to take the answer that says why its request was refused.
const REFUSAL_TIME: Duration = Duration::from_secs(10);
/// The most bytes that one turn copies in one direction, so that others get theirs.
const TURN_BYTES: u64 = 256 << 10;

/// The identity of a connection, or of an association over UDP: one guest, so no source address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectionKey {
    pub guest_port: u16,
    pub destination: SocketAddrV4,
}

impl FromStr for ConnectionKey {
    type Err = ();

    /// Reads the form `40000=9.9.9.9:443`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let (port, destination) = text.split_once('=').ok_or(())?;
        let guest_port = port.parse().map_err(drop)?;
        Ok(Self { guest_port, destination: destination.parse().map_err(drop)? })
    }
}

/// Why a connection is allowed.
#[derive(Clone, Debug)]
pub enum Basis {
    /// A rule allows its address.
    Address { rule: Rc<str> },
    /// A rule allows the name that the address was resolved for, or that the client shows.
    Name { name: String, rule: Rc<str> },
}

impl Basis {
    pub fn rule(&self) -> &Rc<str> {
        match self {
            Self::Address { rule } | Self::Name { rule, .. } => rule,
        }
    }
}

#[derive(Debug)]
enum Stage {
    /// The guest has not completed the handshake, or has and must show a name.
    Waiting,
    /// The addresses of the name are asked for.
    Resolving,
    Dialing,
    Open,
    /// Reset; the guest is about to be told.
    Over,
}

/// A connection and the host's socket for it.
#[derive(Debug)]
pub struct Connection {
    pub key: ConnectionKey,
    pub handle: SocketHandle,
    pub basis: Basis,
    token: Token,
    stage: Stage,
    deadline: Option<Instant>,
    // The first bytes are not judged yet.
    held: bool,
    // Nothing is dialled before the client has shown a name.
    must_show_name: bool,
    addresses: VecDeque<Ipv4Addr>,
    host: Option<TcpStream>,
    /// The TLS of both sides, if the host has secrets.
    tls: Option<Box<Interception>>,
    interest: Interest,
    readable: bool,
    writable: bool,
    host_ended: bool,
    guest_ended: bool,
}

/// The parts of the gateway that a connection uses.
pub struct Context<'a> {
    pub policy: &'a Policy,
    pub secrets: &'a Secrets,
    pub counters: &'a mut Counters,
    pub now: Instant,
}

/// Something that a connection needs from the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Need {
    Nothing,
    /// The addresses of this name.
    Addresses(String),
    /// The connection was denied and is to be recorded.
    Record(Denial),
    /// The host's connection stands.
    Connected,
}

impl Connection {
    pub fn new(
        key: ConnectionKey,
        handle: SocketHandle,
        basis: Basis,
        token: Token,
        policy: &Policy,
        secrets: &Secrets,
        now: Instant,
    ) -> Self {
        let by_name = matches!(basis, Basis::Name { .. });
        let is_named_port = policy.is_named_port(key.destination.port());
        let held = by_name || policy.denies_names() || is_named_port && !secrets.is_empty();
        let must_show_name = by_name && is_named_port;
        Self {
            key,
            handle,
            basis,
            token,
            stage: Stage::Waiting,
            deadline: Some(now + HELLO_TIME),
            held,
            must_show_name,
            addresses: VecDeque::new(),
            host: None,
            tls: None,
            interest: Interest::default(),
            readable: false,
            writable: false,
            host_ended: false,
            guest_ended: false,
        }
    }

    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    fn port(&self) -> Port {
        Port::tcp(self.key.destination.port())
    }

    /// Describes the connection in a record.
    pub fn attempt(&self) -> Attempt {
        let name = match &self.basis {
            Basis::Address { .. } => None,
            Basis::Name { name, .. } => Some(name.clone()),
        };
        let address = IpAddr::V4(*self.key.destination.ip());
        let port = self.key.destination.port();
        Attempt { name, address: Some(address), port: Some(port), protocol: "tcp" }
    }

    /// Notes an event of the host's socket.
    pub fn note(&mut self, readable: bool, writable: bool) {
        self.readable |= readable;
        self.writable |= writable;
    }

    /// Ends the connection; the guest gets a reset.
    pub fn reset(&mut self, socket: &mut Socket<'_>) {
        socket.abort();
        (self.stage, self.host, self.deadline) = (Stage::Over, None, None);
        self.interest = Interest::default();
    }

    /// Judges the connection under a new policy. A connection that is denied is reset.
    pub fn judge_again(&mut self, socket: &mut Socket<'_>, policy: &Policy) -> Result<(), Denial> {
        if matches!(self.stage, Stage::Over) {
            return Ok(());
        }
        let (address, port) = (IpAddr::V4(*self.key.destination.ip()), self.port());
        let verdict = match &self.basis {
            Basis::Address { .. } => policy.judge_address(address, port),
            Basis::Name { name, .. } => policy.judge_name(name, Some(port)),
        };
        let denial = match verdict {
            Verdict::Denied(denial) => denial,
            Verdict::Allowed(allowed) => {
                match &mut self.basis {
                    Basis::Address { rule } | Basis::Name { rule, .. } => *rule = allowed,
                }
                let dialed = self.host.as_ref().and_then(|host| host.peer_addr().ok());
                match (&self.basis, dialed) {
                    (Basis::Name { .. }, Some(dialed)) => {
                        match policy.judge_resolved(dialed.ip(), Some(port)) {
                            Ok(()) => return Ok(()),
                            Err(denial) => denial,
                        }
                    }
                    _ => return Ok(()),
                }
            }
        };
        self.reset(socket);
        Err(denial)
    }

    /// Does what can be done now.
    pub fn advance(&mut self, socket: &mut Socket<'_>, context: &mut Context<'_>) -> Need {
        let now = context.now;
        if !socket.is_active() {
            // Closed by both sides, or reset by the guest.
            self.host = None;
            self.interest = Interest::default();
            return Need::Nothing;
        }
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            if matches!(self.stage, Stage::Dialing) && !self.addresses.is_empty() {
                return self.dial_next(socket, context);
            }
            let nameless = self.held && self.must_show_name;
            self.reset(socket);
            return if nameless { Need::Record(Denial::NoName) } else { Need::Nothing };
        }
        if socket.state() == State::SynReceived {
            return Need::Nothing;
        }
        if self.held {
            match self.judge_hello(socket, context) {
                Err(denial) => {
                    self.reset(socket);
                    return Need::Record(denial);
                }
                Ok(judged) => self.held = !judged,
            }
            if self.tls.is_some() && !matches!(self.stage, Stage::Waiting) {
                // Dialled by its address before the name was seen.
                (self.stage, self.host) = (Stage::Waiting, None);
                self.interest = Interest::default();
            }
        }
        match self.stage {
            Stage::Waiting if self.held && self.must_show_name => Need::Nothing,
            Stage::Waiting => self.find_address(socket, context),
            Stage::Resolving | Stage::Over => Need::Nothing,
            Stage::Dialing => self.finish_dial(socket, context),
            Stage::Open if self.tls.is_some() => self.copy_requests(socket, context),
            Stage::Open => {
                self.copy(socket, context.counters);
                Need::Nothing
            }
        }
    }

    /// Judges the client's first bytes. Returns false if there are too few of them.
    fn judge_hello(
        &mut self,
        socket: &mut Socket<'_>,
        context: &Context<'_>,
    ) -> Result<bool, Denial> {
        let policy = context.policy;
        // Nothing has been taken out of the buffer yet, so these are its first bytes in one piece.
        let bytes = socket.peek(hello::HELLO_MAX).unwrap_or_default();
        let (len, hello) = (bytes.len(), hello::read(bytes));
        let by_name = matches!(self.basis, Basis::Name { .. });
        if hello == Hello::Partial {
            let complete = len >= hello::HELLO_MAX || !matches!(socket.state(), State::Established);
            return match complete {
                _ if !complete => Ok(false),
                _ if by_name && (len > 0 || self.must_show_name) => Err(Denial::NoName),
                _ => Ok(true),
            };
        }
        let is_tls = matches!(hello, Hello::Tls { .. });
        let name = match hello {
            Hello::Tls { encrypted: true, .. } if by_name && !policy.allow_ech => {
                return Err(Denial::EncryptedHello);
            }
            Hello::Tls { name, .. } | Hello::Http { name } => name,
            Hello::Other if self.must_show_name => return Err(Denial::NoName),
            Hello::Other | Hello::Partial => return Ok(true),
        };
        let port = self.port();
        match (name, &mut self.basis) {
            (None, Basis::Name { .. }) => Err(Denial::NoName),
            (None, Basis::Address { .. }) => Ok(true),
            (Some(name), basis) => {
                let verdict = policy.judge_name(&name, Some(port));
                let secrets = context.secrets.of_host(&name);
                let opens = is_tls && !secrets.is_empty() && policy.is_named_port(port.number);
                match (verdict, &mut *basis) {
                    (Verdict::Allowed(rule), _) if opens => {
                        let requests = Requests::new(name.clone(), port.number, secrets);
                        let sides = context.secrets.tls.as_ref().ok_or(Denial::ServerTls)?;
                        let tls = Interception::new(sides, &name, requests);
                        self.tls = Some(Box::new(tls.map_err(|_| Denial::ServerTls)?));
                        *basis = Basis::Name { name, rule };
                        Ok(true)
                    }
                    (Verdict::Allowed(rule), Basis::Name { .. }) => {
                        *basis = Basis::Name { name, rule };
                        Ok(true)
                    }
                    (Verdict::Denied(denial), Basis::Name { name: shown, .. }) => {
                        *shown = name;
                        Err(denial)
                    }
                    (Verdict::Denied(Denial::DeniedByRule), basis) => {
                        *basis = Basis::Name { name, rule: basis.rule().clone() };
                        Err(Denial::DeniedByRule)
                    }
                    _ => Ok(true),
                }
            }
        }
    }

    fn find_address(&mut self, socket: &mut Socket<'_>, context: &mut Context<'_>) -> Need {
        self.stage = Stage::Resolving;
        self.deadline = Some(context.now + RESOLVE_TIME);
        match &self.basis {
            Basis::Name { name, .. } => Need::Addresses(name.clone()),
            Basis::Address { .. } => self.dial(&[*self.key.destination.ip()], socket, context),
        }
    }

    /// Returns whether the connection waits for the addresses of a name.
    pub fn waits_for(&self, resolved: &str) -> bool {
        let same = matches!(&self.basis, Basis::Name { name, .. } if name == resolved);
        matches!(self.stage, Stage::Resolving) && same
    }

    /// Dials the first of the addresses that may be dialled.
    pub fn dial(
        &mut self,
        addresses: &[Ipv4Addr],
        socket: &mut Socket<'_>,
        context: &mut Context<'_>,
    ) -> Need {
        let asked = *self.key.destination.ip();
        let mut addresses = addresses.to_vec();
        // The guest's choice first, if it is one of them.
        addresses.sort_by_key(|address| *address != asked);
        addresses.truncate(DIALS_MAX);
        self.addresses = addresses.into();
        self.dial_next(socket, context)
    }

    fn dial_next(&mut self, socket: &mut Socket<'_>, context: &mut Context<'_>) -> Need {
        let mut denied = None;
        while let Some(address) = self.addresses.pop_front() {
            if let Err(denial) = self.judge_dial(address, context.policy) {
                denied = Some(denial);
                continue;
            }
            let port = self.key.destination.port();
            if let Ok(stream) = sys::connect(SocketAddr::new(address.into(), port)) {
                let _ = stream.set_nodelay(true);
                (self.host, self.interest) = (Some(stream), Interest::default());
                (self.readable, self.writable) = (false, false);
                self.stage = Stage::Dialing;
                self.deadline = Some(context.now + DIAL_TIME);
                return Need::Nothing;
            }
        }
        self.reset(socket);
        denied.map_or(Need::Nothing, Need::Record)
    }

    fn judge_dial(&self, address: Ipv4Addr, policy: &Policy) -> Result<(), Denial> {
        let address = IpAddr::V4(address);
        if let Basis::Name { .. } = self.basis {
            policy.judge_resolved(address, Some(self.port()))?;
        }
        if is_own(address) && !policy.opens_own_address(address, self.port()) {
            return Err(Denial::OwnAddress);
        }
        Ok(())
    }

    fn finish_dial(&mut self, socket: &mut Socket<'_>, context: &mut Context<'_>) -> Need {
        let Some(host) = &self.host else { return self.dial_next(socket, context) };
        if !self.writable {
            return Need::Nothing;
        }
        let failed = !matches!(host.take_error(), Ok(None)) || host.peer_addr().is_err();
        if failed {
            self.host = None;
            return self.dial_next(socket, context);
        }
        (self.stage, self.deadline) = (Stage::Open, None);
        self.readable = true;
        Need::Connected
    }

    fn copy(&mut self, socket: &mut Socket<'_>, counters: &mut Counters) {
        let Some(host) = &mut self.host else { return };
        let (mut out, mut into, mut broken) = (0, 0, false);
        while !self.held && self.writable && out < TURN_BYTES && socket.can_recv() {
            let wrote = socket.recv(|bytes| match host.write(bytes) {
                Ok(len) => (len, Ok(len)),
                Err(error) => (0, Err(error)),
            });
            match wrote {
                Ok(Ok(len)) => out += len as u64,
                Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.writable = false;
                }
                _ => {
                    broken = true;
                    break;
                }
            }
        }
        while self.readable && !self.host_ended && into < TURN_BYTES && socket.can_send() {
            let read = socket.send(|room| match host.read(room) {
                Ok(len) => (len, Ok(len)),
                Err(error) => (0, Err(error)),
            });
            match read {
                Ok(Ok(0)) => {
                    self.host_ended = true;
                    socket.close();
                }
                Ok(Ok(len)) => into += len as u64,
                Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.readable = false;
                }
                _ => {
                    broken = true;
                    break;
                }
            }
        }
        if !self.guest_ended && !self.held && !socket.may_recv() {
            self.guest_ended = true;
            // The host may have closed already; then there is nobody to tell.
            let _ = host.shutdown(Shutdown::Write);
        }
        if out + into > 0 {
            counters.add_bytes(self.basis.rule(), out, into);
        }
        if broken {
            self.reset(socket);
        }
    }

    /// Copies in both directions through the TLS of both sides.
    fn copy_requests(&mut self, socket: &mut Socket<'_>, context: &mut Context<'_>) -> Need {
        let Some(tls) = &mut self.tls else { return Need::Nothing };
        let far = self.host.as_mut().map(|stream| Far {
            stream,
            readable: &mut self.readable,
            writable: &mut self.writable,
            ended: &mut self.host_ended,
        });
        let pumped = tls.pump(socket, far, TURN_BYTES);
        if pumped.bytes_out + pumped.bytes_in > 0 {
            let counters = &mut context.counters;
            counters.add_bytes(self.basis.rule(), pumped.bytes_out, pumped.bytes_in);
        }
        if pumped.broken {
            self.reset(socket);
        }
        match pumped.refused {
            Some(denial) => {
                (self.host, self.interest) = (None, Interest::default());
                self.deadline = Some(context.now + REFUSAL_TIME);
                Need::Record(denial)
            }
            None => Need::Nothing,
        }
    }

    /// Watches the host's socket for what the connection can use next.
    pub fn watch(&mut self, socket: &Socket<'_>, poller: &Poller) -> io::Result<()> {
        let Some(host) = &self.host else { return Ok(()) };
        let interest = match self.stage {
            Stage::Dialing => Interest { readable: false, writable: true },
            _ => {
                let room = self.tls.as_ref().map_or(socket.can_send(), |tls| tls.wants_host());
                let readable = !self.host_ended && !self.readable && room;
                Interest { readable, writable: !self.writable }
            }
        };
        poller.watch(host.as_fd(), self.token, self.interest, interest)?;
        self.interest = interest;
        Ok(())
    }

    /// Returns whether there is more to copy than one turn did.
    pub fn has_more(&self, socket: &Socket<'_>) -> bool {
        if let Some(tls) = &self.tls {
            return tls.has_more && matches!(self.stage, Stage::Open);
        }
        let into = self.readable && !self.host_ended && socket.can_send();
        let out = self.writable && !self.held && socket.can_recv();
        matches!(self.stage, Stage::Open) && self.host.is_some() && (into || out)
    }
}

/// Returns whether an address is one of this host: the kernel would send to it from itself.
pub fn is_own(address: IpAddr) -> bool {
    let source = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        // Connecting a datagram socket sends nothing.
        socket.connect((address, 9))?;
        socket.local_addr()
    });
    let is_source = source.is_ok_and(|source| source.ip() == address);
    // The kernel takes 0.0.0.0 for this host.
    is_source || address.is_loopback() || address.is_unspecified()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_address_is_recognised() {
        assert!(is_own("127.0.0.1".parse().unwrap()));
        assert!(is_own("127.9.9.9".parse().unwrap()));
        assert!(is_own("0.0.0.0".parse().unwrap()));
        assert!(!is_own("192.0.2.1".parse().unwrap()));
    }
}
