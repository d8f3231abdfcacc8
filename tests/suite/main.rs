//! The suite: every promise is tested with a real guest.
//!
//! It is one binary, so that it can be copied to a host with KVM and run there once.

#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod api;
mod balloon;
mod beside;
mod boot;
mod builds;
mod code;
mod compat;
mod copies;
mod cpu;
mod detached;
mod disk_snapshot;
mod drives;
mod egress;
mod errnos;
mod events;
mod examples;
mod exec;
mod files;
mod firecracker;
mod fork;
mod generation;
mod going_on;
mod golden;
mod hostile;
mod identity;
mod images;
mod interrupted;
mod jail;
mod jailed;
mod keeping;
mod killed;
mod limits;
mod mmds;
mod moments;
mod net;
mod other_host;
mod outcomes;
mod outliving;
mod page_server;
mod pause;
mod ports;
mod prune;
mod reboot;
mod refresh;
mod run;
mod runtimes;
mod seccomp;
mod secrets;
mod serve;
mod snapshot;
mod snapshot_files;
mod soak;
mod terminal;
mod tools;
mod traces;
mod travel;
mod undo;
mod vsock;
mod working_set;
