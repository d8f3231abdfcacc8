//! UDP of the guest: the table of associations, each with a connected socket of the host.
//!
//! An association is one port of the guest and one remote address and port. UDP has no end, so an
//! association lasts until nothing has passed for a while, or until a newer one needs its place.
//! No datagram is kept here: what a socket or the link does not take at once is lost, as on any
//! network, and the only queues are the kernel's.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::connection::{Basis, ConnectionKey};
use crate::counters::Attempt;
use crate::frame::MTU;
use crate::policy::{Denial, Port, Protocol};
use crate::sys::{self, Interest, Poller};
use crate::token::Token;

/// The most associations at once. A new one takes the place of the one that was used longest ago:
/// refusing it would let a guest that has asked many servers once ask nobody for a minute, and
/// nobody but the guest itself can fill the table.
pub const ASSOCIATIONS_MAX: usize = 256;
/// How long an association lasts after its last datagram in either direction.
const IDLE: Duration = Duration::from_secs(60);
/// The longest datagram that the guest takes in one packet: fragments are not carried.
pub const PAYLOAD_MAX: usize = MTU - 20 - 8;
/// The room of the kernel's queue for datagrams to the guest.
const RECEIVE_ROOM: usize = 128 << 10;

/// All associations of the guest.
#[derive(Debug, Default)]
pub struct Associations {
    by_key: HashMap<ConnectionKey, u32>,
    by_number: HashMap<u32, Association>,
    /// The associations whose sockets may have datagrams, in the order of their turns.
    ready: VecDeque<u32>,
    last: u32,
}

/// An association and the host's socket for it.
#[derive(Debug)]
pub struct Association {
    pub key: ConnectionKey,
    pub basis: Basis,
    socket: UdpSocket,
    token: Token,
    used: Instant,
    interest: Interest,
}

/// Something that an association's socket had for the guest.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    /// A datagram of this length is in the buffer.
    Datagram(usize),
    /// A datagram that the guest cannot get: it is too long, or not from the remote end.
    Lost,
    /// The remote end, or a host on the way there, refuses datagrams.
    Refused,
}

/// The fate of a datagram of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    Done,
    /// The host had no room for it, or it is too long for the path.
    Lost,
    /// The remote end, or a host on the way there, refuses datagrams.
    Refused,
}

impl Association {
    fn receive(&mut self, buffer: &mut [u8], now: Instant) -> io::Result<Incoming> {
        match self.socket.recv_from(buffer) {
            // One byte more than the longest datagram tells a longer one. The socket may have
            // taken datagrams of others between its birth and its connection.
            Ok((len, from))
                if len <= PAYLOAD_MAX && from == SocketAddr::V4(self.key.destination) =>
            {
                self.used = now;
                Ok(Incoming::Datagram(len))
            }
            Ok(_) => Ok(Incoming::Lost),
            Err(error) if is_temporary(&error) => Err(error),
            Err(_) => Ok(Incoming::Refused),
        }
    }

    fn watch(&mut self, poller: &Poller, readable: bool) -> io::Result<()> {
        let interest = Interest { readable, writable: false };
        poller.watch(self.socket.as_fd(), self.token, self.interest, interest)?;
        self.interest = interest;
        Ok(())
    }
}

impl Associations {
    pub fn count(&self) -> usize {
        self.by_number.len()
    }

    pub fn contains(&self, key: &ConnectionKey) -> bool {
        self.by_key.contains_key(key)
    }

    /// Opens an association. Fails if the host has no way to the remote end.
    pub fn open(
        &mut self,
        key: ConnectionKey,
        basis: Basis,
        poller: &Poller,
        now: Instant,
    ) -> io::Result<()> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        socket.set_nonblocking(true)?;
        // From here on the kernel passes on what this remote end sends, and nothing else.
        socket.connect(key.destination)?;
        sys::set_receive_room(socket.as_fd(), RECEIVE_ROOM);
        self.last = self.last.wrapping_add(1);
        let (number, interest) = (self.last, Interest::default());
        let token = Token::Association(number);
        let mut association = Association { key, basis, socket, token, used: now, interest };
        association.watch(poller, true)?;
        self.remove(&key);
        if self.by_number.len() >= ASSOCIATIONS_MAX {
            self.evict();
        }
        self.by_key.insert(key, number);
        self.by_number.insert(number, association);
        Ok(())
    }

    /// Sends a datagram of the guest. Returns None if there is no such association, and else what
    /// has become of the datagram and why the association is allowed.
    pub fn send(
        &mut self,
        key: &ConnectionKey,
        payload: &[u8],
        now: Instant,
    ) -> Option<(Sent, &Basis)> {
        let association = self.by_number.get_mut(self.by_key.get(key)?)?;
        association.used = now;
        let sent = match association.socket.send(payload) {
            Ok(_) => Sent::Done,
            Err(error) if is_temporary(&error) || is_too_long(&error) => Sent::Lost,
            Err(_) => Sent::Refused,
        };
        Some((sent, &association.basis))
    }

    /// Notes that an association's socket has something to read.
    pub fn note(&mut self, number: u32) {
        if self.by_number.contains_key(&number) && !self.ready.contains(&number) {
            self.ready.push_back(number);
        }
    }

    /// Takes the next thing for the guest. The associations have turns, so that none waits for one
    /// that gets more than others.
    pub fn receive(
        &mut self,
        buffer: &mut [u8; PAYLOAD_MAX + 1],
        poller: &Poller,
        now: Instant,
    ) -> Option<(&Association, Incoming)> {
        while let Some(number) = self.ready.pop_front() {
            let Some(association) = self.by_number.get_mut(&number) else { continue };
            if let Ok(incoming) = association.receive(buffer, now) {
                self.ready.push_back(number);
                return self.by_number.get(&number).map(|association| (association, incoming));
            }
            if association.watch(poller, true).is_err() {
                let key = association.key;
                self.remove(&key);
            }
        }
        None
    }

    /// Stops watching the sockets that are known to have more: their events would be reported again
    /// and again while the guest takes no frames.
    pub fn rest(&mut self, poller: &Poller) {
        for number in &self.ready {
            if let Some(association) = self.by_number.get_mut(number) {
                // A socket that is still watched costs turns, and does no harm.
                let _ = association.watch(poller, false);
            }
        }
    }

    /// Returns whether sockets may have more for the guest.
    pub fn has_more(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Ends the associations that `judge` denies, and returns them with the reasons.
    pub fn judge_again(
        &mut self,
        mut judge: impl FnMut(&mut Association) -> Result<(), Denial>,
    ) -> Vec<(Association, Denial)> {
        let judged = self.by_number.values_mut().filter_map(|association| {
            let denial = judge(association).err()?;
            Some((association.key, denial))
        });
        let denied: Vec<_> = judged.collect();
        let end = |(key, denial)| self.remove(&key).map(|association| (association, denial));
        denied.into_iter().filter_map(end).collect()
    }

    /// Ends the associations that nothing has used for long enough.
    pub fn expire(&mut self, now: Instant) {
        let idle = |association: &&Association| association.used + IDLE <= now;
        let idle: Vec<_> = self.by_number.values().filter(idle).map(|it| it.key).collect();
        idle.iter().for_each(|key| drop(self.remove(key)));
    }

    /// Returns the time of the next call to `expire`.
    pub fn deadline(&self) -> Option<Instant> {
        self.by_number.values().map(|association| association.used + IDLE).min()
    }

    fn evict(&mut self) {
        let oldest = self.by_number.values().min_by_key(|association| association.used);
        if let Some(key) = oldest.map(|association| association.key) {
            self.remove(&key);
        }
    }

    fn remove(&mut self, key: &ConnectionKey) -> Option<Association> {
        let number = self.by_key.remove(key)?;
        self.ready.retain(|ready| *ready != number);
        self.by_number.remove(&number)
    }
}

/// Describes an association, or a datagram that none is opened for, in a record.
pub fn attempt_of(key: &ConnectionKey, basis: Option<&Basis>) -> Attempt {
    let name = match basis {
        Some(Basis::Name { name, .. }) => Some(name.clone()),
        Some(Basis::Address { .. }) | None => None,
    };
    let (address, port) = ((*key.destination.ip()).into(), key.destination.port());
    Attempt { name, address: Some(address), port: Some(port), protocol: Protocol::Udp.word() }
}

/// Returns the remote port.
pub fn port_of(key: &ConnectionKey) -> Port {
    Port::udp(key.destination.port())
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
        || error.raw_os_error() == Some(libc::ENOBUFS)
}

fn is_too_long(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EMSGSIZE)
}

#[cfg(test)]
mod tests;
