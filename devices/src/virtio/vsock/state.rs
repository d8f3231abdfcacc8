//! What a snapshot keeps of a vsock device: who the guest is and where port numbers go on.
//!
//! Connections are not kept: their host ends live in other processes. A restored guest is told to
//! drop its own ends, and the few that it would not drop by itself are listed here.

use serde::{Deserialize, Serialize};

use super::VsockError;
use super::config::check_cid;
use super::connection::Pair;
use super::mux::{FIRST_HOST_PORT, LAST_HOST_PORT, Limits};
use super::wire::TYPE_STREAM;

/// Version 1 of the saved state. Read, no longer written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockStateV1 {
    pub guest_cid: u64,
    /// Goes on where it stood, so that no port means two things in one guest's life.
    pub next_host_port: u32,
    /// Ports that the guest is waiting for and that nobody will answer.
    pub owed_resets: Vec<OwedReset>,
}

/// Version 2 of the saved state. Untrusted until `validate`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockStateV2 {
    pub guest_cid: u64,
    pub next_host_port: u32,
    pub owed_resets: Vec<OwedReset>,
    /// The guest may remember connections that are no more.
    pub connected: bool,
}

impl From<VsockStateV1> for VsockStateV2 {
    fn from(old: VsockStateV1) -> Self {
        let VsockStateV1 { guest_cid, next_host_port, owed_resets } = old;
        Self { guest_cid, next_host_port, owed_resets, connected: true }
    }
}

/// A reset that the guest has not received yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwedReset {
    pub host_port: u32,
    pub guest_port: u32,
    /// The socket type that the guest asked for, offered or not.
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

impl VsockStateV2 {
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
