//! The few devices that a guest expects at fixed ports.
//!
//! | file | contents |
//! | --- | --- |
//! | `serial.rs` | the first serial port |
//! | `console.rs` | how its output reaches the host without ever blocking a vCPU |
//! | `i8042.rs` | the keyboard controller, as far as reboot needs it |
//! | `power.rs` | poweroff and reset registers of hardware-reduced ACPI |

pub mod console;
pub mod i8042;
pub mod power;
pub mod serial;

pub use console::{Console, ConsoleConfig};
pub use i8042::I8042;
pub use power::{PowerEvent, PowerRegisters, PowerSink};
pub use serial::{Serial, SerialStateV1};
