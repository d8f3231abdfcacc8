//! KVM, the kernel's half of the VM. No other module calls it, but that vCPU threads run vCPUs.

pub mod host;
pub(crate) mod state;
pub(crate) mod vcpu;
pub(crate) mod vm;

pub use vm::Kvm;
