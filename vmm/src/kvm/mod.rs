//! KVM: the kernel's half of the machine, and the only place that calls it.

pub mod host;
pub(crate) mod state;
pub(crate) mod vcpu;
pub(crate) mod vm;
