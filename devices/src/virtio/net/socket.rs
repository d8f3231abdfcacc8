//! A packet socket in place of a tap, whose peer is a process that handles the guest's frames.
//!
//! No right and no interface of the host is needed for it. The peer sees plain frames only: nothing
//! behind a socket computes checksums or cuts segments, so the card offers neither. A peer that is
//! gone is like a cable that is unplugged: frames are dropped and counted.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::sys;
use super::tap::{Link, TapError};
use crate::GuestMemory;
use crate::virtio::chain::Segment;

/// The name of every such link; no tap can have it.
pub const SOCKET_NAME: &str = "(socket)";

/// A connected packet socket.
pub struct FrameSocket {
    socket: OwnedFd,
}

impl FrameSocket {
    pub fn open(socket: OwnedFd) -> Result<Self, TapError> {
        if !sys::is_packet_socket(socket.as_fd()) {
            return Err(TapError::NotPackets);
        }
        sys::set_nonblocking(socket.as_fd()).map_err(TapError::SetUp)?;
        Ok(Self { socket })
    }
}

impl Link for FrameSocket {
    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn set_offload(&mut self, offload: u32) -> io::Result<()> {
        if offload == 0 { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
    }

    fn has_offloads(&self) -> bool {
        false
    }

    fn send(&self, first: &[u8], memory: &GuestMemory, rest: &[Segment]) -> io::Result<usize> {
        sys::send_frame(self.socket.as_fd(), first, memory, rest)
    }

    fn name(&self) -> &str {
        SOCKET_NAME
    }
}
