//! A virtio source of randomness (virtio 1.2 section 5.4).
//!
//! | file | contents |
//! | --- | --- |
//! | `config.rs` | what the guest may take |
//! | `device.rs` | the source while no driver uses it |
//! | `worker.rs` | how requests are filled |
//! | `state.rs` | what a snapshot keeps |

mod config;
mod device;
mod state;
mod worker;

#[cfg(test)]
mod tests;

pub use config::RngConfig;
pub use device::Rng;
pub use state::RngStateV1;
