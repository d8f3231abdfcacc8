//! vCPU threads: their control by the owner, and the handling of VM exits.

pub mod run;
pub mod thread;
