//! The kinds of jobs, one file for each, with the requests that start them.

pub mod attached;
pub mod detached;
pub mod exec;
pub mod files;
pub mod forward;
pub mod freeze;
pub mod interpreter;
mod worker;
