//! Virtio over memory-mapped registers (virtio 1.2 section 4.2).
//!
//! | file | contents |
//! | --- | --- |
//! | `registers.rs` | what a register write means in each state of the device |
//! | `transport.rs` | how guest loads and stores reach registers, device thread and interrupt |
//! | `state.rs` | what a snapshot keeps, and which snapshots are refused |

mod registers;
mod state;
mod transport;

#[cfg(test)]
mod tests;

pub use registers::{RING_EVENT_IDX, RING_INDIRECT_DESC, VERSION_1, offset, status};
pub use state::{RestoreError, TransportStateV1};
pub use transport::{KickShortcut, MmioTransport, WINDOW_SIZE};
