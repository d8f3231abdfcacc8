//! The x86-64 machine as a guest sees it before its first instruction.
//!
//! | file | contents |
//! | --- | --- |
//! | `layout.rs` | the guest-physical memory map |
//! | `kernel.rs` | loading kernel, initrd and command line |
//! | `tables.rs` | ACPI tables |
//! | `mp_table.rs` | the MP table, for a kernel without ACPI |
//! | `cpuid.rs`, `msr.rs`, `regs.rs` | the initial state of a vCPU |

pub mod cpuid;
pub mod kernel;
pub mod layout;
pub mod mp_table;
pub mod msr;
pub mod regs;
pub mod tables;
