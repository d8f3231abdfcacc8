//! The launcher's unsafe code: processes, signals, locks, and the host probes of `pvmm doctor`.
//!
//! Everything here is a thin, safe wrapper of a system call, so that the commands need no `unsafe`.

pub mod dumps;
pub mod host;
pub mod lock;
pub mod passing;
pub mod poll;
#[cfg(test)]
pub mod probe;
pub mod process;
pub mod signals;
pub mod terminal;
