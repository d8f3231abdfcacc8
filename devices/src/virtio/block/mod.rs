//! A virtio disk over a raw file or block device of the host (virtio 1.2 section 5.2).
//!
//! | file | contents |
//! | --- | --- |
//! | `config.rs` | the host's configuration of a disk, and the configuration space of the guest |
//! | `device.rs` | the disk while no driver uses it |
//! | `worker.rs` | how requests are served |
//! | `request.rs` | the operations that one request takes |
//! | `state.rs` | what a snapshot keeps |
//! | `wire.rs` | the bytes of a request |
//! | `io/` | the host file and the engines, which do not depend on rings |
//!
//! Images are raw and nothing interprets their content: with a format that has a header, a guest
//! could forge one that names host files.

mod config;
mod device;
pub mod io;
mod request;
mod state;
pub mod wire;
mod worker;

#[cfg(test)]
mod tests;

pub use config::{BlockConfig, BlockError, CacheMode, Source};
pub use device::{Block, BlockHandle, BlockUpdate};
pub use io::EngineKind;
pub use state::BlockStateV1;
