//! The devices of a pvmm machine, and the thread that runs them.
//!
//! They know guest memory, rings and host files, never KVM: everything here can be driven by a test
//! that has no virtual machine at all.

pub mod bus;
pub mod ioapic;
pub mod legacy;
pub mod lines;
pub mod rate_limiter;
pub mod sparse;
mod sys;
pub mod virtio;
pub mod vmgenid;

/// Guest memory as every device sees it.
pub type GuestMemory = vm_memory::GuestMemoryMmap;
