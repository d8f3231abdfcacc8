//! The unsafe code of this crate: processes, signals, locks, file descriptors.
//!
//! Everything here is a thin, safe wrapper of a system call, so that the rest needs no `unsafe`.

pub mod dumps;
pub mod lock;
pub mod passing;
pub mod poll;
#[cfg(test)]
pub mod probe;
pub mod process;
pub mod signals;
