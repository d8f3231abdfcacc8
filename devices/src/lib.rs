//! The devices of a pvmm machine, and the thread that runs them.
//!
//! Devices use guest memory, rings and host files, never KVM: tests drive everything here without a
//! virtual machine. Everything that a guest writes to registers, rings or buffers is untrusted. The
//! crate `pvmm` builds a machine of these parts; use that one to run a guest.
//!
//! | module | contents |
//! | --- | --- |
//! | [`virtio`] | block, net, vsock, balloon and rng over virtio-mmio, and the device thread |
//! | [`legacy`] | serial port, keyboard controller, power registers |
//! | [`bus`] | which device a guest address belongs to |
//! | [`ioapic`], [`lines`] | interrupt lines, and the messages that they send to vCPUs |
//! | [`vmgenid`] | the generation identifier, which changes in a fork |
//! | [`rate_limiter`] | limits on bytes and operations per time |
//! | [`mod@open`], [`sparse`] | host files: opened without blocking, copied without filling holes |

use std::io;
use std::sync::Arc;

pub mod bus;
pub mod ioapic;
pub mod legacy;
pub mod lines;
pub mod open;
pub mod rate_limiter;
pub mod sparse;
mod sys;
pub mod virtio;
pub mod vmgenid;

pub use sys::listen_privately;

/// The stack size of a machine's threads and of the threads that serve it. They call nothing deep,
/// and stacks that lie close together share the host's page tables.
pub const STACK_BYTES: usize = 512 << 10;

/// The first step of a thread, such as a system call filter. A thread whose first step fails does
/// not run.
pub type ThreadEntry = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// Guest memory as every device sees it.
pub type GuestMemory = vm_memory::GuestMemoryMmap;
