//! The link to the guest's network card: a packet socket with a virtio header before each frame.
//!
//! smoltcp sees it as a device that carries IP packets; Ethernet is added and taken off here.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;

use crate::frame::{ETHERNET_LEN, Ends, MTU};
use crate::sys;

/// The header before each frame (virtio 1.2 section 5.1.6.1); all zero, because no offload is used.
pub const HEADER_LEN: usize = 12;
/// The longest message.
pub const MESSAGE_MAX: usize = HEADER_LEN + ETHERNET_LEN + MTU;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_ARP: u16 = 0x0806;
// smoltcp holds data back when this many frames wait for the guest.
const WAITING_MAX: usize = 256;
// Datagrams have room of their own: neither TCP nor UDP can keep the other from the guest.
const DATAGRAMS_MAX: usize = 64;
// Answers of the gateway itself may exceed that, and are then dropped.
const ANSWERS_MAX: usize = WAITING_MAX + DATAGRAMS_MAX + 128;
const SEND_ROOM: usize = 1 << 20;

/// The host's end of the link.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
    pub ends: Ends,
    incoming: Option<Vec<u8>>,
    waiting: VecDeque<Waiting>,
    waiting_datagrams: usize,
    /// Frames for the guest that were dropped.
    pub lost: u64,
}

/// A message on its way to the guest.
#[derive(Debug)]
struct Waiting {
    message: Vec<u8>,
    is_datagram: bool,
}

/// The result of reading from the link.
#[derive(Debug, PartialEq, Eq)]
pub enum Received<'a> {
    Frame(&'a [u8]),
    /// A message that is too short or too long.
    Malformed,
    Empty,
    /// The peer has closed the link.
    Gone,
}

impl Link {
    pub fn new(socket: OwnedFd, ends: Ends) -> Self {
        sys::set_send_room(socket.as_fd(), SEND_ROOM);
        let waiting = VecDeque::new();
        Self { socket, ends, incoming: None, waiting, waiting_datagrams: 0, lost: 0 }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Receives the next frame.
    pub fn receive<'a>(&self, buffer: &'a mut [u8; MESSAGE_MAX]) -> Received<'a> {
        match sys::receive(self.socket.as_fd(), buffer) {
            Ok(0) => Received::Gone,
            Ok(len) => match buffer.get(HEADER_LEN..len) {
                // Offloads were not offered. The count of buffers has no meaning in this direction.
                Some(frame) if buffer[..10] == [0; 10] => Received::Frame(frame),
                _ => Received::Malformed,
            },
            Err(error) if is_temporary(&error) => Received::Empty,
            Err(_) => Received::Gone,
        }
    }

    /// Queues an IP packet that the gateway wrote itself.
    pub fn answer(&mut self, packet: &[u8]) {
        self.queue_answer(ETHERTYPE_IPV4, packet);
    }

    /// Queues a datagram of a remote end, in an IP packet.
    pub fn queue_datagram(&mut self, packet: &[u8]) {
        self.waiting_datagrams += 1;
        let fill = |bytes: &mut [u8]| bytes.copy_from_slice(packet);
        self.queue(ETHERTYPE_IPV4, packet.len(), true, fill);
    }

    /// Queues an ARP packet.
    pub fn answer_arp(&mut self, packet: &[u8]) {
        self.queue_answer(ETHERTYPE_ARP, packet);
    }

    /// Returns whether the next answer is queued, and not dropped.
    fn takes_answers(&self) -> bool {
        self.waiting.len() < ANSWERS_MAX
    }

    fn queue_answer(&mut self, kind: u16, packet: &[u8]) {
        if !self.takes_answers() {
            self.lost += 1;
            return;
        }
        self.queue(kind, packet.len(), false, |bytes| bytes.copy_from_slice(packet));
    }

    fn queue<R>(
        &mut self,
        kind: u16,
        len: usize,
        is_datagram: bool,
        fill: impl FnOnce(&mut [u8]) -> R,
    ) -> R {
        const START: usize = HEADER_LEN + ETHERNET_LEN;
        let mut message = vec![0; START + len];
        let guest = self.ends.guest_mac.unwrap_or(smoltcp::wire::EthernetAddress::BROADCAST);
        message[HEADER_LEN..HEADER_LEN + 6].copy_from_slice(&guest.0);
        message[HEADER_LEN + 6..HEADER_LEN + 12].copy_from_slice(&self.ends.gateway_mac.0);
        message[HEADER_LEN + 12..START].copy_from_slice(&kind.to_be_bytes());
        let filled = fill(&mut message[START..]);
        self.waiting.push_back(Waiting { message, is_datagram });
        filled
    }

    /// Gives the waiting frames to the guest, as many as it takes. Returns false if the link is
    /// gone.
    pub fn flush(&mut self) -> bool {
        while let Some(Waiting { message, is_datagram }) = self.waiting.front() {
            let datagrams = usize::from(*is_datagram);
            match sys::send(self.socket.as_fd(), message) {
                Err(error) if is_temporary(&error) => break,
                Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => self.lost += 1,
                Err(_) => return false,
                Ok(_) => {}
            }
            self.waiting_datagrams -= datagrams;
            self.waiting.pop_front();
        }
        true
    }

    /// Returns whether a datagram for the guest is queued, and not better left in its socket.
    pub fn takes_datagrams(&self) -> bool {
        self.waiting_datagrams < DATAGRAMS_MAX
    }

    /// Returns whether frames wait for the guest.
    pub fn is_blocked(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Hands a packet to smoltcp, which takes it with its next poll.
    pub fn put(&mut self, packet: &[u8]) {
        self.incoming = Some(packet.to_vec());
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
        || error.raw_os_error() == Some(libc::ENOBUFS)
}

/// A packet on its way to smoltcp.
pub struct Incoming(Vec<u8>);

/// The right to queue one packet for the guest.
pub struct Outgoing<'a>(&'a mut Link);

impl Device for Link {
    type RxToken<'a> = Incoming;
    type TxToken<'a> = Outgoing<'a>;

    fn receive(&mut self, _now: Instant) -> Option<(Incoming, Outgoing<'_>)> {
        let packet = self.incoming.take()?;
        Some((Incoming(packet), Outgoing(self)))
    }

    fn transmit(&mut self, _now: Instant) -> Option<Outgoing<'_>> {
        let others = self.waiting.len() - self.waiting_datagrams;
        (others < WAITING_MAX).then_some(Outgoing(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        capabilities
    }
}

impl RxToken for Incoming {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, take: F) -> R {
        take(&self.0)
    }
}

impl TxToken for Outgoing<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, fill: F) -> R {
        self.0.queue(ETHERTYPE_IPV4, len, false, fill)
    }
}
