//! Virtio 1.2 over MMIO: the transport, the rings and one folder per device.
//!
//! | file | what it answers |
//! | --- | --- |
//! | `device.rs` | what a device and its worker must supply |
//! | `registry.rs` | which devices exist |
//! | `queue.rs`, `chain.rs` | how guest rings are read, once and checked |
//! | `interrupt.rs` | how a worker gets the driver's attention |
//! | `vsock/` | streams to and from Unix sockets of the host |

pub mod chain;
pub mod device;
pub mod interrupt;
pub mod queue;
pub mod registry;
pub mod vsock;

pub use chain::Chain;
pub use device::{Activation, Stopped, VirtioDevice, Worker};
pub use interrupt::Interrupt;
pub use queue::{QueueConfig, QueueFault, VirtQueue};
