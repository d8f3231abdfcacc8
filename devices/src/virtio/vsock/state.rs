//! The state that a snapshot keeps of a vsock device: the guest's address and the next port number.
//!
//! Connections are not kept: their host ends are in other processes. A restored guest is made to
//! drop its own ends, and the few that it would not drop by itself are listed here.

use serde::{Deserialize, Serialize};

use super::VsockError;
use super::config::check_cid;
use super::connection::Pair;
use super::mux::{FIRST_HOST_PORT, LAST_HOST_PORT, Limits};
use super::wire::TYPE_STREAM;

/// The saved state of a vsock device. Untrusted until `validate`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockStateV1 {
    pub guest_cid: u64,
    /// Continues after a restore, so that no port is used for two connections in one guest's life.
    pub next_host_port: u32,
    /// Resets for ports that the guest waits for in vain.
    pub owed_resets: Vec<OwedReset>,
    /// The guest may remember connections that no longer exist.
    pub connected: bool,
}

/// A reset that the guest has not received yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwedReset {
    pub host_port: u32,
    pub guest_port: u32,
    /// The socket type that the guest asked for, supported or not.
    pub kind: u16,
}

impl OwedReset {
    pub fn stream(pair: Pair) -> Self {
        Self { host_port: pair.host_port, guest_port: pair.guest_port, kind: TYPE_STREAM }
    }

    pub fn pair(&self) -> Pair {
        Pair { host_port: self.host_port, guest_port: self.guest_port }
    }
}

impl VsockStateV1 {
    /// Checks a state that came from a file.
    pub fn validate(&self) -> Result<(), VsockError> {
        check_cid(self.guest_cid)?;
        if !(FIRST_HOST_PORT..LAST_HOST_PORT).contains(&self.next_host_port) {
            return Err(VsockError::SavedPort { port: self.next_host_port });
        }
        let limits = Limits::default();
        let (owed, max) = (self.owed_resets.len(), limits.resets + limits.connections);
        if owed > max {
            return Err(VsockError::SavedResets { owed, max });
        }
        Ok(())
    }
}
