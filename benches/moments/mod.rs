//! The moments that are promised to be quick or small, one file for each.

mod api;
mod boot;
mod create;
mod exec;
mod fork_memory;
mod grow;
mod live_fork;
mod load;
mod overhead;
mod processes;
mod rate;
mod rollback;
mod run;
pub mod set_up;
mod snapshot;
mod throughput;

use crate::board::{Board, Outcome};
use crate::stage::{Baking, Stage};

/// A moment of VMs that are made from a snapshot or a template.
type Baked = fn(&Stage, &Baking, &mut Board) -> Outcome<()>;
pub const BAKED: [(&str, Baked); 9] = [
    ("create", create::run),
    ("load", load::run),
    ("live-fork", live_fork::run),
    ("rollback", rollback::run),
    ("snapshot", snapshot::run),
    ("fork-memory", fork_memory::run),
    ("rate", rate::run),
    ("grow", grow::run),
    ("api", api::run),
];

/// A moment of VMs that are booted.
type Booted = fn(&Stage, &mut Board) -> Outcome<()>;
pub const BOOTED: [(&str, Booted); 5] = [
    ("boot", boot::run),
    ("exec", exec::run),
    ("overhead", overhead::run),
    ("throughput", throughput::run),
    ("run", run::run),
];
