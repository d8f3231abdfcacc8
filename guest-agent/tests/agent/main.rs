//! End-to-end tests: the real agent program, as a service on this machine, and the real host end.
//! No VM is needed: a Unix socket stands in for vsock, and everything behind it is the same.
#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

mod detached;
mod exec;
mod files;
mod fixture;
mod forward;
mod hostile;
mod interpreter;
mod large;
mod metrics;
mod refresh;
mod streams;
mod terminal;
mod trees;
mod trees_of_files;
