//! The agent's listening sockets: a vsock port, or a Unix socket where there is no vsock.
//!
//! Only this module decides who may talk to the agent.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use pvmm_guest_agent::limits::HOST_CID;

use crate::sys;

/// A listening socket.
pub enum Listener {
    Vsock(OwnedFd),
    Unix(OwnedFd),
}

impl Listener {
    /// Listens on the agent's vsock port.
    pub fn vsock(port: u32) -> io::Result<Self> {
        sys::vsock::listen(port).map(Self::Vsock)
    }

    /// Listens on a Unix socket that only this user can reach.
    pub fn unix(path: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Self::Unix(listener.into()))
    }

    pub fn fd(&self) -> &OwnedFd {
        let (Self::Vsock(fd) | Self::Unix(fd)) = self;
        fd
    }

    /// Accepts the next client; returns `None` for a client that is not the host.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        match self {
            // A process in the guest must not become root by connecting to the agent.
            Self::Vsock(fd) => {
                sys::vsock::accept(fd).map(|(socket, cid)| (cid == HOST_CID).then_some(socket))
            }
            Self::Unix(fd) => sys::unix_accept(fd).map(Some),
        }
    }
}
