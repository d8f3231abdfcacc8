//! A virtio network card over a tap of the host, or over a socket (virtio 1.2 section 5.1).
//!
//! | file | contents |
//! | --- | --- |
//! | `config.rs` | the host's configuration of a card, and the configuration space of the guest |
//! | `device.rs` | the card while no driver uses it |
//! | `worker.rs` | which events are served, and in which order |
//! | `rx.rs`, `tx.rs` | how a frame gets into the guest's buffers, and out of them |
//! | `state.rs` | what a snapshot keeps |
//! | `wire.rs` | the header before a frame, and which headers are accepted |
//! | `tap.rs` | the host's interface, which does not depend on rings |
//! | `socket.rs` | a packet socket in the tap's place |
//! | `mmds/` | the metadata service, which answers in place of the network |
//! | `testing.rs` | a card on a socket instead of a tap |
//!
//! There is one pair of queues and no control queue. Checksums and TCP segmentation are left to the
//! host's kernel in both directions, unless the card is on a socket; UDP fragmentation is obsolete,
//! and USO would tie a snapshot to new hosts. A frame that cannot be sent or received is dropped
//! and counted, as on any network: nothing that happens to a tap ends or blocks the machine.

mod config;
mod device;
pub mod mmds;
mod rx;
mod socket;
mod state;
mod sys;
mod tap;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tx;
pub mod wire;
mod worker;

#[cfg(test)]
mod tests;

pub use config::{Mac, MacError, NetConfig, NetError, TapSource};
pub(in crate::virtio) use device::feature::OFFLOADS;
pub use device::{Net, NetUpdate};
pub use mmds::{MmdsConfig, MmdsVersion};
pub use socket::SOCKET_NAME;
pub use state::NetStateV1;
pub use tap::TapError;
