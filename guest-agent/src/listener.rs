//! Where clients come from: the vsock port, or a Unix socket where there is no vsock.
//! Who may talk to the agent is decided here and nowhere else.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use pvmm_guest_agent::limits::HOST_CID;

use crate::sys;

/// Where clients come from.
pub enum Listener {
    Vsock(OwnedFd),
    Unix(OwnedFd),
}

impl Listener {
    /// Listens on the agent's vsock port.
    pub fn vsock(port: u32) -> io::Result<Self> {
        sys::vsock_listen(port).map(Self::Vsock)
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

    /// The next client; `None` in place of one that is not the host.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        match self {
            // A process in the guest must not become root by talking to us.
            Self::Vsock(fd) => {
                sys::vsock_accept(fd).map(|(socket, cid)| (cid == HOST_CID).then_some(socket))
            }
            Self::Unix(fd) => sys::unix_accept(fd).map(Some),
        }
    }
}
