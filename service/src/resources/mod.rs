//! The handlers of the API, one file for each resource.
//!
//! A handler takes its request apart, calls `life` or the agent in the guest, and writes the
//! answer.

pub mod absent;
pub mod builds;
pub mod checkpoints;
pub mod code;
pub mod egress;
pub mod exec;
pub mod files;
pub mod forks;
pub mod hibernation;
pub mod lifecycle;
pub mod logs;
pub mod me;
pub mod metrics;
pub mod overview;
pub mod pause;
pub mod pool;
pub mod ports;
pub mod sandboxes;
pub mod snapshots;
pub mod ssh;
pub mod templates;
pub mod volumes;
