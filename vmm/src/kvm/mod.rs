//! KVM, the kernel's half of the VM. No other module calls it.

pub mod host;
pub(crate) mod state;
pub(crate) mod vcpu;
pub(crate) mod vm;

pub use vm::Kvm;
