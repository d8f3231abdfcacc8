//! A virtio balloon: memory that the guest does not need goes back to the host (virtio 1.2 section
//! 5.5).
//!
//! | file | contents |
//! | --- | --- |
//! | `config.rs` | the host's configuration of a balloon, and the configuration space of the guest |
//! | `device.rs` | the balloon while no driver uses it, and what the host may change |
//! | `worker.rs` | how the queues are served |
//! | `pages.rs` | which guest pages are released, however the guest names them |
//! | `stats.rs` | the guest's statistics of its memory |
//! | `hint.rs` | a run in which the guest lists its free pages |
//! | `state.rs` | what a snapshot keeps |
//!
//! Memory leaves in four ways: the host sets a target and the driver gives up as many pages
//! (inflate); the driver names free blocks all the time (reporting), or once when asked (hinting);
//! and under pressure it takes pages back by itself, if deflate-on-oom was offered.
//!
//! A released page is dropped with `MADV_DONTNEED`, or with `MADV_REMOVE` where it is in a file
//! that only this machine uses, which then has a hole there. Elsewhere guest memory is a private
//! mapping, so the page then reads as the content below it: zeros for a machine that was booted,
//! the snapshot's bytes for one that was restored. Those bytes are the guest's own, and a driver
//! may not rely on any content of a page that it gave away. Only a guest that poisons or zeroes
//! pages when it frees them would notice, and the poison feature by which it would agree to give
//! away such pages is not offered, so it then reports none. Mapping zeros over the page instead
//! would break the guarantee that dropping a guest's pages restores its snapshot.
//!
//! Hinting has a race that the specification leaves to the device: under memory pressure Linux may
//! take a hinted page back before the device has handled it. Hinting is therefore off unless asked
//! for, and should be used while the guest's workload is idle.

mod config;
mod device;
mod hint;
mod pages;
mod state;
mod stats;
mod sys;
mod worker;

#[cfg(test)]
mod tests;

pub use config::{BalloonConfig, pages_of_mib};
pub use device::{Balloon, BalloonUpdate};
pub use state::{BalloonError, BalloonStateV1};
pub use stats::BalloonStats;
