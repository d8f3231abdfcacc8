//! A virtio disk over a raw file or block device of the host (virtio 1.2 section 5.2).
//!
//! | file | what it answers |
//! | --- | --- |
//! | `config.rs` | what the host may ask for, and what the guest reads of it |
//! | `device.rs` | the disk while no driver uses it |
//! | `worker.rs` | how requests are served |
//! | `request.rs` | what operations one request takes |
//! | `state.rs` | what a snapshot keeps |
//! | `wire.rs` | the bytes of a request |
//! | `io/` | the host file and the engines, which know nothing of rings |
//!
//! Images are raw and nothing looks inside them: a format that the guest could forge a header of would
//! let it name host files.

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
