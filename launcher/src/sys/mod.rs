//! The launcher's unsafe code: the terminal, and the host probes of `pvmm doctor`.
//!
//! Everything here is a thin, safe wrapper of a system call, so that the commands need no `unsafe`.

pub mod host;
pub mod terminal;
