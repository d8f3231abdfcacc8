//! x
pub mod audit;
pub mod counters;
pub mod dns;
pub mod frame;
pub mod hello;
pub mod names;
pub mod policy;
pub mod ranges;
pub mod rate;
pub mod reply;
