//! How a VM ended, and how the thread that notices the end reports it.

use std::sync::Arc;

/// How a VM ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest switched itself off.
    Poweroff,
    /// The guest asked for a reset.
    Reboot,
    /// A fault that no handler took: a kernel that crashed beyond its own help, or never was one.
    TripleFault,
    /// KVM could not go on with the guest.
    InternalError {
        /// The number in KVM's `internal.suberror`.
        suberror: u32,
    },
    /// The processor refused the guest's state.
    EntryFailed {
        /// The processor's number for the reason, as in KVM's `fail_entry`.
        reason: u64,
    },
    /// The process that supplied the guest's memory is gone.
    MemoryLost,
    /// The host failed in the middle of a change of the whole machine, such as a rollback.
    Broken {
        /// The error that came first.
        why: String,
    },
    /// KVM gave up on the vCPU for a reason that this machine never asks for.
    UnexpectedExit {
        /// The exit as text, or the error number of `KVM_RUN`.
        exit: String,
    },
}

/// Reports the end of a VM. The first vCPU, device or server that notices an end calls it.
pub type Report = Arc<dyn Fn(Outcome) + Send + Sync>;
