//! The devices of a pvmm machine, and the thread that runs them.
//!
//! They know guest memory, rings and host files, never KVM: everything here can be driven by a test
//! that has no virtual machine at all.

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

/// The stack of a machine's threads, and of those beside it. They call nothing deep, and stacks that lie close together share the host's tables.
pub const STACK_BYTES: usize = 512 << 10;

/// Guest memory as every device sees it.
pub type GuestMemory = vm_memory::GuestMemoryMmap;
