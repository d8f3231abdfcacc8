//! Virtio 1.2 over MMIO: the transport, the rings and one folder per device.
//!
//! | file | contents |
//! | --- | --- |
//! | `device.rs` | the trait of a device that no driver uses |
//! | `worker.rs` | the trait of one in use, and what all of these have in common |
//! | `registry.rs` | the list of devices, and how each is opened and restored |
//! | `queue.rs`, `chain.rs` | how guest rings are read, once and checked |
//! | `interrupt.rs` | how a worker notifies the driver |
//! | `counters.rs` | what a device counts about its driver |
//! | `mmio/` | what the guest's loads and stores mean |
//! | `device_loop.rs`, `thread.rs` | the event loop that runs the devices, and its thread |
//! | `alarm.rs` | how long the loop may wait |
//! | `balloon/`, `block/`, `net/`, `rng/`, `vsock/` | one device each |
//! | `testing.rs`, `conformance.rs` | a driver to test them with, and the tests that every device must pass |

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
pub mod worker;

pub use chain::Chain;
pub use counters::Counters;
pub use device::{Activation, UpdateError, Updated, VirtioDevice};
pub use device_loop::{DeviceError, DeviceId};
pub use interrupt::Interrupt;
pub use mmio::MmioTransport;
pub use queue::{QueueConfig, QueueFault, VirtQueue};
pub use registry::DeviceKind;
pub use thread::{DeviceHandle, DeviceThread};
pub use worker::{Rings, Worker};
