//! x
pub mod hello;
pub mod policy;
pub mod ranges;
