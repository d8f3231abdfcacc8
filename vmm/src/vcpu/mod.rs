//! vCPU threads: how they are driven, and what each exit from the guest means.

pub mod run;
pub mod thread;
