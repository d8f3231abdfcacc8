//! A card on a wire: a datagram socket in place of the tap, whose other end a test or fuzz target
//! keeps.
//!
//! A socket keeps frame boundaries as a tap does, needs no rights, and is gone with its test.
#![allow(clippy::unwrap_used, reason = "a wire that cannot be laid should end its test")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::config::Mac;
use super::device::Net;
use super::sys;
use super::tap::Link;
use super::wire::HEADER_LEN;
use crate::GuestMemory;
use crate::rate_limiter::{RateLimiter, RateLimiterConfig};
use crate::virtio::chain::Segment;

/// The queues.
pub const RX: usize = 0;
pub const TX: usize = 1;
/// The card's address.
pub const MAC: Mac = Mac([2, 0, 0, 0, 0, 9]);
/// The header of a frame that uses no offload.
pub const NO_HEADER: [u8; HEADER_LEN] = [0; HEADER_LEN];

struct Wire {
    socket: UnixDatagram,
    offload: Arc<AtomicU32>,
}

impl Link for Wire {
    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn set_offload(&mut self, offload: u32) -> io::Result<()> {
        self.offload.store(offload, Ordering::SeqCst);
        Ok(())
    }

    fn has_offloads(&self) -> bool {
        true
    }

    fn send(&self, first: &[u8], memory: &GuestMemory, rest: &[Segment]) -> io::Result<usize> {
        sys::write_frame(self.socket.as_fd(), first, memory, rest)
    }

    fn name(&self) -> &str {
        "wire"
    }
}

/// The host's end of the wire.
pub struct Peer {
    pub(super) socket: UnixDatagram,
    offload: Arc<AtomicU32>,
}

impl Peer {
    /// Returns the offloads that the card allowed the tap.
    pub fn offload(&self) -> u32 {
        self.offload.load(Ordering::SeqCst)
    }

    /// Sends a frame. Returns false if the wire is full.
    pub fn offer(&self, frame: &[u8]) -> bool {
        self.socket.send(&[&NO_HEADER, frame].concat()).is_ok()
    }

    /// Sends a frame; the wire must have room.
    pub fn send(&self, frame: &[u8]) {
        assert!(self.offer(frame), "the wire is full");
    }

    /// Receives the next frame from the guest, with its header.
    pub fn receive(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![0; 70_000];
        let len = self.socket.recv(&mut bytes).ok()?;
        bytes.truncate(len);
        Some(bytes)
    }
}

/// Creates a card and the other end of its wire.
pub fn wired() -> (Net, Peer) {
    limited(RateLimiterConfig::default(), RateLimiterConfig::default())
}

/// Creates a card with rate limits and the other end of its wire.
pub fn limited(rx: RateLimiterConfig, tx: RateLimiterConfig) -> (Net, Peer) {
    let (near, far) = UnixDatagram::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    far.set_nonblocking(true).unwrap();
    let offload = Arc::new(AtomicU32::new(0));
    let link = Box::new(Wire { socket: near, offload: offload.clone() });
    let net = Net {
        mac: MAC,
        mtu: None,
        link,
        rx_limiter: RateLimiter::new(&rx),
        tx_limiter: RateLimiter::new(&tx),
        mmds: None,
        host_errors: 0,
    };
    (net, Peer { socket: far, offload })
}

/// Creates two connected packet sockets, for a card and for the peer that handles its frames.
pub fn packet_sockets() -> (OwnedFd, OwnedFd) {
    sys::packet_sockets().unwrap()
}
