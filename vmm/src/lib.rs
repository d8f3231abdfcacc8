//! Placeholder.

pub mod kvm;
