//! The first serial port: a 16550 by vm-superio, between a guest and a console of the host.
//!
//! vCPUs access it through ports and never wait: output goes to the console's bounded buffer, input
//! comes from a bounded buffer that is refilled as the guest reads.

use std::collections::VecDeque;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial as Uart, Trigger};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::console::ConsoleInput;
use crate::bus::BusDevice;
use crate::lines::Line;

/// The number of ports.
pub const PORTS: u64 = 8;

// The maximum host input that waits for room in the FIFO.
const PENDING_MAX: usize = 4 << 10;
// Interrupt enable bits, and the identification register's value for each; bit 0 means no
// interrupt.
const RECEIVED: u8 = 1 << 0;
const SENT: u8 = 1 << 1;
const RECEIVED_ID: u8 = 1 << 2;
const SENT_ID: u8 = 1 << 1;
const NONE_ID: u8 = 1 << 0;

/// The state of a serial port at the time of a snapshot. Untrusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialStateV1 {
    pub baud_divisor_low: u8,
    pub baud_divisor_high: u8,
    pub interrupt_enable: u8,
    pub interrupt_identification: u8,
    pub line_control: u8,
    pub line_status: u8,
    pub modem_control: u8,
    pub modem_status: u8,
    pub scratch: u8,
    pub received: Vec<u8>,
    pub pending: Vec<u8>,
}

/// Why a saved serial port was refused.
#[derive(Debug, thiserror::Error)]
pub enum SerialError {
    #[error("saved serial port holds {len} bytes of input, more than {max}")]
    TooMuchInput { len: usize, max: usize },
    #[error("serial port cannot be restored: {reason}")]
    Restore { reason: String },
}

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.raise();
        Ok(())
    }
}

/// A serial port.
pub struct Serial {
    port: Mutex<Port>,
    line: Line,
    output: ConsoleInput,
    input_room: EventFd,
}

struct Port {
    uart: Uart<Line, NoEvents, ConsoleInput>,
    pending: VecDeque<u8>,
}

impl Serial {
    /// Creates a port that prints to `output`.
    pub fn new(output: ConsoleInput, line: Line) -> io::Result<Self> {
        let uart = Uart::new(line.clone(), output.clone());
        let port = Mutex::new(Port { uart, pending: VecDeque::new() });
        Ok(Self { port, line, output, input_room: EventFd::new(EFD_NONBLOCK)? })
    }

    /// Takes as much host input as fits and returns how much that was. If it was not all, wait for
    /// `input_room` before offering the rest.
    pub fn feed(&self, bytes: &[u8]) -> usize {
        let mut port = self.port();
        let room = PENDING_MAX.saturating_sub(port.pending.len());
        let taken = bytes.get(..room).unwrap_or(bytes);
        port.pending.extend(taken);
        port.refill();
        taken.len()
    }

    /// Returns an eventfd that is readable when the guest has read and there is room for input
    /// again.
    pub fn input_room(&self) -> &EventFd {
        &self.input_room
    }

    pub fn save(&self) -> SerialStateV1 {
        let port = self.port();
        let state = port.uart.state();
        SerialStateV1 {
            baud_divisor_low: state.baud_divisor_low,
            baud_divisor_high: state.baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            received: state.in_buffer,
            pending: port.pending.iter().copied().collect(),
        }
    }

    /// Restores a saved port, before the guest runs.
    pub fn restore(&self, state: &SerialStateV1) -> Result<(), SerialError> {
        if state.pending.len() > PENDING_MAX {
            let (len, max) = (state.pending.len(), PENDING_MAX);
            return Err(SerialError::TooMuchInput { len, max });
        }
        // An interrupt may have been pending when the snapshot was taken. Raising it once more
        // costs the guest a read of its registers; losing it would leave a transmission waiting for
        // ever.
        let mut pending_ids = 0;
        if state.interrupt_enable & SENT != 0 {
            pending_ids |= SENT_ID;
        }
        if state.interrupt_enable & RECEIVED != 0 && !state.received.is_empty() {
            pending_ids |= RECEIVED_ID;
        }
        let saved_ids = state.interrupt_identification & (SENT_ID | RECEIVED_ID);
        let ids = saved_ids | pending_ids;
        let saved = SerialState {
            baud_divisor_low: state.baud_divisor_low,
            baud_divisor_high: state.baud_divisor_high,
            interrupt_enable: state.interrupt_enable & 0x0f,
            interrupt_identification: if ids == 0 { NONE_ID } else { ids },
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            in_buffer: state.received.clone(),
        };
        let uart = Uart::from_state(&saved, self.line.clone(), NoEvents, self.output.clone())
            .map_err(|error| SerialError::Restore { reason: error.to_string() })?;
        let pending = state.pending.iter().copied().collect();
        *self.port() = Port { uart, pending };
        Ok(())
    }

    fn port(&self) -> MutexGuard<'_, Port> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Port {
    /// Moves pending input into the guest's FIFO, as far as there is room.
    fn refill(&mut self) {
        while self.uart.fifo_capacity() > 0 {
            let (bytes, _) = self.pending.as_slices();
            // Loopback mode accepts nothing; the input waits until it ends.
            match self.uart.enqueue_raw_bytes(bytes) {
                Ok(taken @ 1..) => drop(self.pending.drain(..taken)),
                _ => return,
            }
        }
    }
}

impl BusDevice for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let (Ok(offset), [byte]) = (u8::try_from(offset), data) else { return };
        let mut port = self.port();
        *byte = port.uart.read(offset);
        if !port.pending.is_empty() {
            port.refill();
            if port.pending.len() < PENDING_MAX {
                // Only a counter at its maximum refuses, and then it is readable anyway.
                let _ = self.input_room.write(1);
            }
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let (Ok(offset), [byte]) = (u8::try_from(offset), data) else { return };
        // Neither the console nor the line ever fails.
        let _ = self.port().uart.write(offset, *byte);
    }
}

#[cfg(test)]
mod tests {
    use super::super::console::{Console, ConsoleConfig};
    use super::*;
    use crate::lines::testing::{self, Raised};

    const DATA: u64 = 0;
    const ENABLE: u64 = 1;
    const STATUS: u64 = 5;

    fn serial() -> (Serial, Console, Raised) {
        let console = Console::new(Box::new(io::sink()), ConsoleConfig::default());
        let (line, raised) = testing::line();
        (Serial::new(console.input(), line).unwrap(), console, raised)
    }

    fn read(serial: &Serial, offset: u64) -> u8 {
        let mut data = [0];
        serial.read(offset, &mut data);
        data[0]
    }

    /// Reads while the status reports data.
    fn read_all(serial: &Serial) -> Vec<u8> {
        let ready = || read(serial, STATUS) & 1 != 0;
        std::iter::from_fn(|| ready().then(|| read(serial, DATA))).collect()
    }

    #[test]
    fn output_reaches_the_console() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let target = Box::new(path.reopen().unwrap());
        let console = Console::new(target, ConsoleConfig::default());
        let serial = Serial::new(console.input(), testing::line().0).unwrap();
        b"hello".iter().for_each(|byte| serial.write(DATA, &[*byte]));
        drop(console);
        assert_eq!(std::fs::read(path.path()).unwrap(), b"hello");
    }

    #[test]
    fn input_reaches_the_guest_with_an_interrupt() {
        let (serial, _console, raised) = serial();
        serial.write(ENABLE, &[RECEIVED]);
        assert_eq!(serial.feed(b"hi"), 2);
        assert_ne!(raised.take(), 0);
        assert_eq!(read_all(&serial), b"hi");
    }

    #[test]
    fn input_beyond_the_fifo_is_refilled_as_the_guest_reads() {
        let (serial, _console, _) = serial();
        let input: Vec<u8> = (0..1000).map(|i| i as u8).collect();
        assert_eq!(serial.feed(&input), 1000);
        assert_eq!(read_all(&serial), input);
    }

    #[test]
    fn f2_input_flood_to_a_guest_that_never_reads_is_bounded() {
        let (serial, _console, _) = serial();
        let taken: usize = (0..100_000).map(|_| serial.feed(&[b'x'; 1000])).sum();
        assert_eq!(taken, PENDING_MAX + 64);
        assert!(serial.input_room().read().is_err());
        read(&serial, DATA);
        assert!(serial.input_room().read().is_ok());
        assert_eq!(serial.feed(b"yy"), 1);
    }

    #[test]
    fn f4_restore_in_the_middle_of_a_transmission_raises_the_interrupt_again() {
        let (before, _console, _) = serial();
        before.write(ENABLE, &[SENT]);
        before.write(DATA, b"x");
        // The guest has read the identification register, and waits for the next interrupt.
        read(&before, 2);
        let state = before.save();
        let (after, _console, raised) = serial();
        after.restore(&state).unwrap();
        assert_ne!(raised.take(), 0);
        assert_eq!(read(&after, 2) & 0xf, SENT_ID);
    }

    #[test]
    fn restore_of_a_saved_port_keeps_registers_and_input() {
        let (before, _console, _) = serial();
        before.write(ENABLE, &[RECEIVED]);
        before.write(7, &[0x5a]);
        before.feed(&[7; 100]);
        let state = before.save();
        let (after, _console, raised) = serial();
        after.restore(&state).unwrap();
        assert_eq!(after.save(), state);
        assert_ne!(raised.take(), 0);
        assert_eq!(read_all(&after), [7; 100]);
        assert_eq!(read(&after, 7), 0x5a);
    }

    #[test]
    fn restore_of_too_much_input_is_refused() {
        let (serial, _console, _) = serial();
        let good = serial.save();
        let received = SerialStateV1 { received: vec![0; 65], ..good.clone() };
        let pending = SerialStateV1 { pending: vec![0; PENDING_MAX + 1], ..good };
        assert!(serial.restore(&received).is_err());
        assert!(serial.restore(&pending).is_err());
    }

    #[test]
    fn access_of_other_sizes_or_offsets_reads_zero_and_does_nothing() {
        let (serial, _console, _) = serial();
        serial.write(7, &[0x5a, 0x5a]);
        serial.write(1 << 32 | 7, &[0x5a]);
        let mut data = [0xee; 2];
        serial.read(STATUS, &mut data);
        assert_eq!((data, read(&serial, 7)), ([0; 2], 0));
    }
}
