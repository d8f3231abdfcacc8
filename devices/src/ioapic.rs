//! The I/O APIC: turns the lines of devices into messages for the local APICs.
//!
//! It is here and not in the kernel because creating KVM's own would register it on KVM's I/O bus,
//! and every memory slot or vCPU created after such a registration waits for a grace period. This
//! machine has only edge-triggered interrupts, so a redirection entry only defines the message of
//! its line (`lines.rs`), and no interrupt ever passes through this code.

use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::bus::BusDevice;
use crate::lines::{Deliver, Line, Lines, Message, PINS};

/// The size of the registers' address range.
pub const SIZE: u64 = 0x1000;

const SELECT: u64 = 0x00;
const WINDOW: u64 = 0x10;
const ID: u8 = 0x00;
const VERSION: u8 = 0x01;
const ARBITRATION: u8 = 0x02;
const TABLE: u8 = 0x10;

// 82093AA: no EOI register.
const VERSION_VALUE: u32 = 0x11;
const MASKED: u64 = 1 << 16;
// Only the chip sets delivery status and remote IRR; with edge interrupts they stay clear.
const READ_ONLY: u64 = 1 << 12 | 1 << 14;

/// The registers in a snapshot. Untrusted when read from a file, but any value is legal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoapicStateV1 {
    pub select: u8,
    pub id: u32,
    pub entries: Vec<u64>,
}

/// The I/O APIC on the memory bus.
pub struct Ioapic {
    registers: Mutex<Registers>,
    lines: Arc<Lines>,
}

struct Registers {
    select: u8,
    id: u32,
    entries: [u64; PINS],
    /// The number of lines reported to the guest. A kernel reads and writes the entry of each while
    /// it boots, so unused lines are not reported, although their entries exist.
    wired: usize,
}

impl Ioapic {
    pub fn new(deliver: Deliver) -> Self {
        let registers = Registers { select: 0, id: 0, entries: [MASKED; PINS], wired: 1 };
        Self { registers: Mutex::new(registers), lines: Lines::new(deliver) }
    }

    /// Returns the line of a device.
    pub fn line(&self, pin: u32) -> Line {
        let mut registers = self.lock();
        registers.wired = registers.wired.max(pin as usize + 1).min(PINS);
        self.lines.line(pin)
    }

    pub fn save(&self) -> IoapicStateV1 {
        let registers = self.lock();
        let entries = registers.entries.to_vec();
        IoapicStateV1 { select: registers.select, id: registers.id, entries }
    }

    /// Restores saved registers and sets the message of every line.
    pub fn restore(&self, state: &IoapicStateV1) {
        let mut registers = self.lock();
        registers.select = state.select;
        registers.id = state.id;
        for (pin, entry) in state.entries.iter().enumerate().take(PINS) {
            registers.set_entry(pin, *entry, &self.lines);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Registers> {
        // Nothing panics while holding the lock, and the registers are legal at every instant.
        self.registers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BusDevice for Ioapic {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let registers = self.lock();
        let value = match offset {
            SELECT => u32::from(registers.select),
            WINDOW => registers.read(),
            _ => 0,
        };
        if let Ok(data) = <&mut [u8; 4]>::try_from(data) {
            *data = value.to_le_bytes();
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let Ok(data) = <[u8; 4]>::try_from(data) else { return };
        let value = u32::from_le_bytes(data);
        let mut registers = self.lock();
        match offset {
            SELECT => registers.select = value as u8,
            WINDOW => registers.write(value, &self.lines),
            _ => {}
        }
    }
}

impl Registers {
    fn read(&self) -> u32 {
        match self.select {
            ID | ARBITRATION => self.id,
            VERSION => VERSION_VALUE | (self.wired as u32 - 1) << 16,
            _ => self.half().map_or(0, |(pin, shift)| (self.entries[pin] >> shift) as u32),
        }
    }

    fn write(&mut self, value: u32, lines: &Lines) {
        if self.select == ID {
            self.id = value & 0x0f00_0000;
        } else if let Some((pin, shift)) = self.half() {
            let kept = self.entries[pin] & !(0xffff_ffff << shift);
            self.set_entry(pin, kept | (u64::from(value) << shift), lines);
        }
    }

    /// Returns the selected redirection entry, and the shift of its selected half.
    fn half(&self) -> Option<(usize, u32)> {
        let index = usize::from(self.select.checked_sub(TABLE)?);
        let pin = index / 2;
        (pin < PINS).then_some((pin, 32 * (index as u32 % 2)))
    }

    fn set_entry(&mut self, pin: usize, entry: u64, lines: &Lines) {
        let entry = entry & !READ_ONLY;
        self.entries[pin] = entry;
        lines.set(pin, message(entry));
    }
}

/// Returns the message of an entry. Trigger mode is always edge: a level-triggered line would need
/// an end-of-interrupt message back from the local APIC, and no device here holds a line asserted.
fn message(entry: u64) -> Option<Message> {
    if entry & MASKED != 0 {
        return None;
    }
    let vector = entry & 0xff;
    let delivery_mode = entry >> 8 & 0x7;
    let logical = entry >> 11 & 1;
    let destination = entry >> 56 & 0xff;
    // Lowest priority needs the redirection hint.
    let hint = u64::from(delivery_mode == 1);
    Some(Message {
        address: (0xfee0_0000 | destination << 12 | hint << 3 | logical << 2) as u32,
        data: (vector | delivery_mode << 8) as u32,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates an I/O APIC and a log of the messages that its lines deliver.
    fn ioapic() -> (Ioapic, Arc<Mutex<Vec<Message>>>) {
        let log = Arc::new(Mutex::new(Vec::new()));
        let to = log.clone();
        (Ioapic::new(Box::new(move |message| to.lock().unwrap().push(message))), log)
    }

    fn set(ioapic: &Ioapic, register: u8, value: u32) {
        ioapic.write(SELECT, &u32::from(register).to_le_bytes());
        ioapic.write(WINDOW, &value.to_le_bytes());
    }

    fn get(ioapic: &Ioapic, register: u8) -> u32 {
        ioapic.write(SELECT, &u32::from(register).to_le_bytes());
        let mut data = [0; 4];
        ioapic.read(WINDOW, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn entry_unmasked_is_delivered_and_masked_is_not() {
        let (ioapic, log) = ioapic();
        let line = ioapic.line(5);
        line.raise();
        set(&ioapic, TABLE + 2 * 5 + 1, 3 << 24);
        set(&ioapic, TABLE + 2 * 5, 0x31);
        line.raise();
        set(&ioapic, TABLE + 2 * 5, 0x1_0031);
        line.raise();
        assert_eq!(*log.lock().unwrap(), [Message { address: 0xfee0_3000, data: 0x31 }]);
    }

    #[test]
    fn registers_out_of_range_read_zero_and_ignore_writes() {
        let (ioapic, _) = ioapic();
        let before = ioapic.save();
        for register in [3, 0xf, TABLE + 2 * PINS as u8, 0xff] {
            set(&ioapic, register, u32::MAX);
            assert_eq!(get(&ioapic, register), 0);
        }
        assert_eq!(ioapic.save().entries, before.entries);
    }

    #[test]
    fn access_of_odd_size_is_ignored() {
        let (ioapic, _) = ioapic();
        ioapic.write(SELECT, &[TABLE]);
        ioapic.write(SELECT, &[0; 8]);
        let mut data = [0; 2];
        ioapic.read(WINDOW, &mut data);
        assert_eq!((data, ioapic.save().select), ([0; 2], 0));
    }

    #[test]
    fn restored_chip_delivers_what_the_saved_one_did_and_nothing_else() {
        let (saved, _) = ioapic();
        set(&saved, TABLE, 0x40);
        let (other, log) = ioapic();
        set(&other, TABLE + 2 * 4, 0x55);
        other.restore(&saved.save());
        other.line(0).raise();
        other.line(4).raise();
        assert_eq!(*log.lock().unwrap(), [Message { address: 0xfee0_0000, data: 0x40 }]);
        other.line(9);
        other.line(2);
        assert_eq!(get(&other, VERSION) >> 16, 9);
    }
}
