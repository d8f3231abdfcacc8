//! The launcher's unsafe home: processes, signals, locks and the host questions `doctor` asks.
//!
//! Everything here is a thin, safe door to one system call, so that the verbs stay free of `unsafe`.

pub mod dumps;
pub mod host;
pub mod lock;
pub mod passing;
pub mod poll;
pub mod process;
pub mod signals;
pub mod terminal;
