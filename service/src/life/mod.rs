//! The life of a sandbox in the server: start, use, hibernate, wake, end, and the restart of the
//! server itself.
//!
//! The rules of a VM are the library's. Here is what the server adds: rows, tokens, limits, and
//! that a request to a hibernated sandbox wakes it.

mod build;
mod end;
mod enter;
mod folders;
mod fork;
mod hibernate;
mod reconcile;
mod start;
mod sweep;

pub use build::{build_folder, build_log, build_sources, reconcile_builds, start_build};
pub use end::end;
pub use enter::{InUse, enter};
pub use fork::{EXPLORE_TTL_KEY, MAX_CHILDREN, PARENT_KEY, TREE_KEY, fork};
pub use hibernate::{hibernate, wake};
pub use reconcile::reconcile;
pub use start::{MAX_TTL_S, Source, StartRequest, egress_of, prepare, start};
pub use sweep::sweep;
