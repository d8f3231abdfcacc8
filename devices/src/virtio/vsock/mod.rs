//! virtio-vsock: streams between the guest and Unix sockets of the host, without kernel help.
//!
//! | file | contents |
//! | --- | --- |
//! | `config.rs` | the host's configuration of the device |
//! | `device.rs` | what is opened, offered and restored |
//! | `worker.rs` | how queues, deadlines and sockets drive the multiplexer |
//! | `mux.rs` | which streams exist and what packets do to them |
//! | `connection.rs` | one connection as a state machine |
//! | `resync.rs` | how a restored guest drops its old connections |
//! | `credit.rs` | how much either side may send |
//! | `host.rs`, `sys.rs` | the Unix sockets, and their system calls |
//! | `wire.rs` | the byte layout of packets and events |
//! | `state.rs` | what a snapshot keeps |
//! | `testing.rs` | a random walk with scripted sockets |

pub mod config;
pub mod connection;
pub mod credit;
pub mod device;
pub mod host;
pub mod mux;
mod resync;
pub mod state;
mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod wire;
pub mod worker;

#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;

pub use config::{MAX_UDS_PATH, VsockConfig};
pub use device::Vsock;
pub use state::VsockStateV1;

/// Why a vsock device could not be created.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    #[error("guest CID {guest_cid} is not between 3 and 4294967294")]
    GuestCid { guest_cid: u64 },
    #[error("socket path {path:?} does not name a file")]
    Path { path: PathBuf },
    #[error("socket path {path:?} has {len} bytes, more than {max}")]
    PathTooLong { path: PathBuf, len: usize, max: usize },
    #[error("socket {path:?} is in use by a running process")]
    InUse { path: PathBuf },
    #[error("cannot listen on socket {path:?}")]
    Bind {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot open a descriptor")]
    Descriptor(#[source] io::Error),
    #[error("saved host port {port:#x} is out of range")]
    SavedPort { port: u32 },
    #[error("saved state owes {owed} resets, more than {max}")]
    SavedResets { owed: usize, max: usize },
}
