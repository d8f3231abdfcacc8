//! The x86-64 machine that a guest sees before its first instruction.
//!
//! | file | what it answers |
//! | --- | --- |
//! | `layout.rs` | what lies where in guest memory |
//! | `kernel.rs` | how kernel, initrd and command line get there |
//! | `tables.rs` | what ACPI says of the machine |
//! | `cpuid.rs`, `msr.rs`, `regs.rs` | what a vCPU starts with |

pub mod cpuid;
pub mod kernel;
pub mod layout;
pub mod msr;
pub mod regs;
pub mod tables;
