//! The registers by which a guest powers off or resets its machine (ACPI 6.5 section 4.8.3.7).
//!
//! Hardware-reduced ACPI has no power management block; three one-byte registers take its place.

use std::sync::Arc;

use crate::bus::BusDevice;

/// The number of ports of the registers.
pub const PORTS: u64 = 3;
/// Offset of the sleep control register.
pub const SLEEP_CONTROL: u64 = 0;
/// Offset of the sleep status register.
pub const SLEEP_STATUS: u64 = 1;
/// Offset of the reset register.
pub const RESET: u64 = 2;
/// The sleep type for poweroff, which the DSDT's `_S5` object must contain.
pub const SLEEP_TYPE_S5: u8 = 5;
/// The reset value, which the FADT must contain.
pub const RESET_VALUE: u8 = 1;

const SLEEP_ENABLE: u8 = 1 << 5;

/// A power request of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerEvent {
    Poweroff,
    Reset,
}

/// Receives power events on the vCPU thread that caused them. It must not block.
pub type PowerSink = Arc<dyn Fn(PowerEvent) + Send + Sync>;

/// The three power registers.
pub struct PowerRegisters {
    sink: PowerSink,
}

impl PowerRegisters {
    pub fn new(sink: PowerSink) -> Self {
        Self { sink }
    }
}

impl BusDevice for PowerRegisters {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // The machine never wakes from a sleep, so no status bit is ever set.
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        match (offset, data) {
            // Bits 2 to 4 are the sleep state.
            (SLEEP_CONTROL, [value])
                if value & SLEEP_ENABLE != 0 && value >> 2 & 7 == SLEEP_TYPE_S5 =>
            {
                (self.sink)(PowerEvent::Poweroff);
            }
            (RESET, [RESET_VALUE]) => (self.sink)(PowerEvent::Reset),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Returns the events that the registers report for these writes.
    fn events(writes: &[(u64, &[u8])]) -> Vec<PowerEvent> {
        let events = Arc::new(Mutex::new(Vec::new()));
        let seen = events.clone();
        let registers =
            PowerRegisters::new(Arc::new(move |event| seen.lock().unwrap().push(event)));
        writes.iter().for_each(|(offset, data)| registers.write(*offset, data));
        events.lock().unwrap().clone()
    }

    #[test]
    fn b13_sleep_control_with_s5_powers_off() {
        assert_eq!(events(&[(SLEEP_CONTROL, &[0x34])]), [PowerEvent::Poweroff]);
    }

    #[test]
    fn b13_reset_value_resets() {
        assert_eq!(events(&[(RESET, &[RESET_VALUE])]), [PowerEvent::Reset]);
    }

    #[test]
    fn write_of_anything_else_does_nothing() {
        let others: [(u64, &[u8]); 6] = [
            (SLEEP_CONTROL, &[0x14]),
            (SLEEP_CONTROL, &[0x30]),
            (SLEEP_CONTROL, &[0x34, 0]),
            (SLEEP_STATUS, &[0x80]),
            (RESET, &[0]),
            (99, &[0x34]),
        ];
        assert_eq!(events(&others), []);
    }
}
