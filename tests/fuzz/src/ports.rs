//! Accesses of any width and order to what is not virtio: serial port, keyboard controller, power
//! registers, interrupt controller, and the bus itself.
//!
//! Their state can be saved and put back after any sequence, and what they put out is bounded.

use std::io;
use std::sync::Arc;

use pvmm_devices::bus::{Bus, BusDevice};
use pvmm_devices::ioapic::Ioapic;
use pvmm_devices::legacy::console::{Console, ConsoleConfig};
use pvmm_devices::legacy::i8042::{self, I8042};
use pvmm_devices::legacy::power::{self, PowerRegisters};
use pvmm_devices::legacy::serial::{self, Serial};
use pvmm_devices::lines::{Line, Message, PINS};

use crate::input::Input;

pub fn accesses(bytes: &[u8]) {
    // One thread for all inputs: what is tried is the registers, not its start.
    thread_local! {
        static CONSOLE: Console =
            Console::new(Box::new(io::sink()), ConsoleConfig::default());
    }
    let mut input = Input::new(bytes);
    let console = CONSOLE.with(Console::input);
    // Nothing but an interrupt may be sent on a guest's word.
    let deliver = |message: Message| assert_eq!(message.address >> 20, 0xfee);
    let ioapic = Arc::new(Ioapic::new(Box::new(deliver)));
    let lines: Vec<_> = (0..=PINS as u32).map(|pin| ioapic.line(pin)).collect();
    let serial = Arc::new(Serial::new(console, ioapic.line(1)).unwrap());
    let keyboard = I8042::new(Arc::new(|_| {}), ioapic.line(2));
    let mut bus = Bus::default();
    bus.insert(0x100, serial::PORTS, serial.clone()).unwrap();
    bus.insert(0x200, i8042::PORTS, Arc::new(keyboard)).unwrap();
    bus.insert(0x300, power::PORTS, Arc::new(PowerRegisters::new(Arc::new(|_| {})))).unwrap();
    bus.insert(0x1000, 0x1000, ioapic.clone()).unwrap();
    while !input.is_empty() {
        let address = match input.below(5) {
            0 => 0x100 + u64::from(input.below(9)),
            1 => 0x200 + u64::from(input.below(9)),
            2 => 0x300 + u64::from(input.below(9)),
            3 => 0x1000 + u64::from(input.below(64)),
            _ => input.number(),
        };
        let width = usize::from(input.below(9));
        match input.below(5) {
            0 => {
                let mut data = [0; 8];
                bus.read(address, &mut data[..width]);
            }
            1 => {
                serial.feed(&input.bytes::<5>());
            }
            2 => {
                let state = serial.save();
                serial.restore(&state).unwrap();
                // An interrupt may be raised again, so that none is lost.
                let mut again = serial.save();
                again.interrupt_identification = state.interrupt_identification;
                assert_eq!(again, state);
                let state = ioapic.save();
                ioapic.restore(&state);
                assert_eq!(ioapic.save(), state);
            }
            _ => {
                bus.write(address, &input.u64().to_le_bytes()[..width]);
            }
        }
        // Registers keep answering.
        let mut byte = [0];
        serial.read(5, &mut byte);
        lines.iter().for_each(Line::raise);
    }
}
