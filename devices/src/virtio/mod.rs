//! Virtio 1.2 over MMIO: the transport, the rings and one folder per device.
//!
//! | file | what it answers |
//! | --- | --- |
//! | `device.rs` | what a device and its worker must supply |
//! | `registry.rs` | which devices exist |
//! | `queue.rs`, `chain.rs` | how guest rings are read, once and checked |
//! | `interrupt.rs` | how a worker gets the driver's attention |
//! | `counters.rs` | what a device counts about its driver |
//! | `mmio/` | what the guest's loads and stores mean |
//! | `device_loop.rs`, `thread.rs` | who runs the devices |
//! | `alarm.rs` | until when the loop may wait |
//! | `balloon/`, `block/`, `net/`, `rng/`, `vsock/` | one device each |
//! | `testing.rs`, `conformance.rs` | a driver to test them with, and what every device must pass |

mod alarm;
pub mod balloon;
pub mod block;
pub mod chain;
#[cfg(test)]
mod conformance;
pub mod counters;
pub mod device;
pub mod device_loop;
pub mod interrupt;
pub mod mmio;
pub mod net;
pub mod queue;
pub mod registry;
pub mod rng;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
pub mod thread;
pub mod vsock;

pub use chain::Chain;
pub use counters::Counters;
pub use device::{Activation, Stopped, UpdateError, Updated, VirtioDevice, Worker};
pub use device_loop::{DeviceError, DeviceId};
pub use interrupt::Interrupt;
pub use mmio::MmioTransport;
pub use queue::{QueueConfig, QueueFault, VirtQueue};
pub use registry::DeviceKind;
pub use thread::{DeviceHandle, DeviceThread};
