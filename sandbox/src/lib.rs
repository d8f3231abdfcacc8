//! The life of a sandbox, written once for every door: the `pvmm` commands, the service, MCP.
//!
//! A sandbox is a VM with a directory (`vm_dir`), a supervisor and a monitor process in a jail
//! (`vmm_process`, `jail`), and, if it was asked for, a process through which it reaches the
//! network (`egress`). No daemon is needed: all that one program knows of a sandbox that another
//! has started is in its directory.

pub mod checkpoint_tree;
pub mod control;
pub mod copies;
pub mod denial_log;
pub mod disk_snapshot;
pub mod dockerfile;
pub mod drive;
pub mod egress;
pub mod end;
pub mod events;
pub mod failure;
pub mod file_diff;
pub mod guest_agent;
pub mod hibernated;
pub mod jail;
pub mod kernel_file;
pub mod log_file;
pub mod logger;
pub mod machine;
pub mod net;
pub mod net_card;
pub mod overrides;
pub mod ports;
pub mod prepare;
pub mod prune;
pub mod rootfs;
pub mod sandboxes;
pub mod scratch;
pub mod seccomp;
pub mod secrets;
pub mod snapshots;
pub mod sys;
pub mod travel;
pub mod usage;
pub mod vm_dir;
pub mod vmm_process;
pub mod volumes;
pub mod warm;

pub use failure::{Failure, FailureKind};
pub use sandboxes::{CreateOptions, ForkOptions, Sandbox, Sandboxes};
pub use vm_dir::VolumeMount;
