//! pvmm: an embeddable virtual machine monitor.

pub mod agent;
pub mod exec;
