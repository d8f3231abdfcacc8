//! The keyboard controller with a minimal keyboard: reset, Ctrl-Alt-Del, and answers that keep a
//! driver's probe short.
//!
//! A guest that reboots through the keyboard controller, as Linux does by default, pulses its reset
//! line. A driver that probes it gets every answer at once instead of waiting for one that never
//! comes. No state is saved: the state that a key press needs is in the guest's driver.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use super::power::{PowerEvent, PowerSink};
use crate::bus::BusDevice;
use crate::lines::Line;

/// The first port, and the number of ports up to the command port.
pub const PORT_BASE: u64 = 0x60;
pub const PORTS: u64 = 5;

const DATA: u64 = 0;
const SPEAKER: u64 = 1;
const COMMAND: u64 = 4;

// Status: output is waiting, the self-test passed, and the keyboard is not locked.
const OUTPUT_FULL: u8 = 1 << 0;
const SYSTEM_OK: u8 = 1 << 2;
const UNLOCKED: u8 = 1 << 4;
// Control byte: the self-test passed, keyboard and auxiliary port are off.
const CONTROL_AT_START: u8 = SYSTEM_OK | KEYBOARD_OFF | AUX_OFF;
const KEYBOARD_OFF: u8 = 1 << 4;
const AUX_OFF: u8 = 1 << 5;
// Timer 2 has always expired, for code that waits for it.
const TIMER_DONE: u8 = 1 << 5;
// More than any answer; answers that a guest does not read are dropped.
const ANSWERS_MAX: usize = 16;
// Control, Alt and Delete are pressed and released, in scan code set 2, which the controller does
// not translate.
const CTRL_ALT_DEL: [u8; 11] = [0x14, 0x11, 0xe0, 0x71, 0xe0, 0xf0, 0x71, 0xf0, 0x11, 0xf0, 0x14];
// The keyboard's acknowledgement of a byte.
const ACKNOWLEDGE: u8 = 0xfa;

/// The controller at ports 0x60 to 0x64.
pub struct I8042 {
    state: Mutex<ControllerState>,
    keyboard_line: Line,
    sink: PowerSink,
}

#[derive(Debug, Default)]
struct ControllerState {
    control: u8,
    answers: VecDeque<Answer>,
    // A controller command whose parameter comes to the data port.
    awaiting: Option<u8>,
    // A keyboard command whose parameter comes to the data port.
    keyboard_awaiting: Option<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Answer {
    byte: u8,
    // Bytes of the keyboard raise an interrupt; the controller's own answers are polled.
    from_keyboard: bool,
}

impl I8042 {
    pub fn new(sink: PowerSink, keyboard_line: Line) -> Self {
        let state = ControllerState { control: CONTROL_AT_START, ..ControllerState::default() };
        Self { state: Mutex::new(state), keyboard_line, sink }
    }

    /// Presses Ctrl-Alt-Del. The keys are lost if the guest has not read earlier ones.
    pub fn press_ctrl_alt_del(&self) {
        self.with_state(|state| {
            if state.answers.len() + CTRL_ALT_DEL.len() <= ANSWERS_MAX {
                CTRL_ALT_DEL.into_iter().for_each(|byte| state.type_byte(byte));
            }
        });
        self.announce();
    }

    /// Interrupts the guest if the next byte to be read is from the keyboard.
    fn announce(&self) {
        let next = self.with_state(|state| state.answers.front().copied());
        if next.is_some_and(|answer| answer.from_keyboard) {
            self.keyboard_line.raise();
        }
    }

    fn with_state<T>(&self, act: impl FnOnce(&mut ControllerState) -> T) -> T {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl ControllerState {
    fn answer(&mut self, byte: u8) {
        self.queue(Answer { byte, from_keyboard: false });
    }

    fn type_byte(&mut self, byte: u8) {
        self.queue(Answer { byte, from_keyboard: true });
    }

    fn queue(&mut self, answer: Answer) {
        if self.answers.len() < ANSWERS_MAX {
            self.answers.push_back(answer);
        }
    }

    /// Handles a byte for the keyboard, which answers like one that was just plugged in.
    fn keyboard(&mut self, byte: u8) {
        let awaiting = self.keyboard_awaiting.take();
        if byte == 0xee && awaiting.is_none() {
            self.type_byte(byte);
            return;
        }
        self.type_byte(ACKNOWLEDGE);
        match (awaiting, byte) {
            // The current scan code set.
            (Some(0xf0), 0) => self.type_byte(2),
            (Some(_), _) => {}
            // Lights, scan codes and repeat rate have a parameter.
            (None, 0xed | 0xf0 | 0xf3) => self.keyboard_awaiting = Some(byte),
            // The identifier of a keyboard.
            (None, 0xf2) => [0xab, 0x83].into_iter().for_each(|byte| self.type_byte(byte)),
            // The self-test passed.
            (None, 0xff) => self.type_byte(0xaa),
            (None, _) => {}
        }
    }

    /// Handles a controller command. Returns true if it resets the machine.
    fn command(&mut self, command: u8) -> bool {
        self.awaiting = None;
        match command {
            0x20 => self.answer(self.control),
            0xa7 => self.control |= AUX_OFF,
            0xa8 => self.control &= !AUX_OFF,
            // The auxiliary port fails its test, so that drivers do not probe for a mouse.
            0xa9 => self.answer(0x02),
            0xaa => self.answer(0x55),
            0xab => self.answer(0x00),
            0xad => self.control |= KEYBOARD_OFF,
            0xae => self.control &= !KEYBOARD_OFF,
            0xd0 => self.answer(0x00),
            0x60 | 0xd1..=0xd4 => self.awaiting = Some(command),
            // Pulses the output lines whose bit is zero; bit 0 is the reset line.
            0xf0..=0xff => return command & 1 == 0,
            _ => {}
        }
        false
    }

    /// Handles a byte for the data port. Returns true if it resets the machine.
    fn data(&mut self, byte: u8) -> bool {
        match self.awaiting.take() {
            Some(0x60) => self.control = byte,
            // The output port: bit 0 is the reset line, active low.
            Some(0xd1) => return byte & 1 == 0,
            // Loops back, and never as auxiliary data: there is no auxiliary port.
            Some(0xd2 | 0xd3) => self.answer(byte),
            // For a mouse, which does not exist: an answer would be taken for that of the next
            // command.
            Some(_) => {}
            None => self.keyboard(byte),
        }
        false
    }
}

impl I8042 {
    fn read_data(&self) -> u8 {
        let answer = self.with_state(|state| state.answers.pop_front());
        self.announce();
        answer.map_or(0, |answer| answer.byte)
    }
}

impl BusDevice for I8042 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let [byte] = data else { return };
        *byte = match offset {
            DATA => self.read_data(),
            SPEAKER => TIMER_DONE,
            COMMAND => self.with_state(|state| {
                let full = if state.answers.is_empty() { 0 } else { OUTPUT_FULL };
                full | SYSTEM_OK | UNLOCKED
            }),
            _ => 0,
        };
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let [byte] = *data else { return };
        let reset = match offset {
            DATA => self.with_state(|state| state.data(byte)),
            COMMAND => self.with_state(|state| state.command(byte)),
            _ => false,
        };
        self.announce();
        // After unlock, because the sink is the caller's code.
        if reset {
            (self.sink)(PowerEvent::Reset);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::lines::testing::{self, Raised};

    fn controller() -> (I8042, Arc<AtomicU32>) {
        let (controller, resets, _) = controller_with_line();
        (controller, resets)
    }

    fn controller_with_line() -> (I8042, Arc<AtomicU32>, Raised) {
        let resets = Arc::new(AtomicU32::new(0));
        let count = resets.clone();
        let sink = move |event| {
            assert_eq!(event, PowerEvent::Reset);
            count.fetch_add(1, Ordering::Relaxed);
        };
        let (line, raised) = testing::line();
        (I8042::new(Arc::new(sink), line), resets, raised)
    }

    fn read(controller: &I8042, offset: u64) -> u8 {
        let mut data = [0xee];
        controller.read(offset, &mut data);
        data[0]
    }

    /// Sends a command as a driver does, and reads the answer if the status reports one.
    fn ask(controller: &I8042, command: u8, parameter: Option<u8>) -> Option<u8> {
        controller.write(COMMAND, &[command]);
        if let Some(byte) = parameter {
            controller.write(DATA, &[byte]);
        }
        (read(controller, COMMAND) & OUTPUT_FULL != 0).then(|| read(controller, DATA))
    }

    #[test]
    fn b13_pulse_of_the_reset_line_resets_once() {
        let (controller, resets) = controller();
        controller.write(COMMAND, &[0xfe]);
        assert_eq!(resets.load(Ordering::Relaxed), 1);
        ask(&controller, 0xff, None);
        assert_eq!(resets.load(Ordering::Relaxed), 1);
        ask(&controller, 0xd1, Some(0xfe));
        assert_eq!(resets.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn status_when_idle_lets_a_rebooting_guest_go_on() {
        let (controller, _) = controller();
        assert_eq!(read(&controller, COMMAND) & 3, 0);
    }

    #[test]
    fn probe_gets_every_answer_at_once() {
        let (controller, _) = controller();
        assert_eq!(ask(&controller, 0x20, None), Some(CONTROL_AT_START));
        ask(&controller, 0x60, Some(0x65));
        assert_eq!(ask(&controller, 0x20, None), Some(0x65));
        assert_eq!(ask(&controller, 0xaa, None), Some(0x55));
        assert_eq!(ask(&controller, 0xab, None), Some(0));
        assert_eq!(ask(&controller, 0xa9, None), Some(2));
        assert_eq!(ask(&controller, 0xd3, Some(0x5a)), Some(0x5a));
    }

    /// Reads bytes on interrupts as a driver does, until there are none.
    fn typed(controller: &I8042, raised: &Raised) -> Vec<u8> {
        let interrupted = || raised.take() > 0;
        std::iter::from_fn(|| interrupted().then(|| read(controller, DATA))).collect()
    }

    #[test]
    fn keys_are_read_byte_by_byte_each_with_its_interrupt() {
        let (controller, _, raised) = controller_with_line();
        controller.press_ctrl_alt_del();
        assert_ne!(read(&controller, COMMAND) & OUTPUT_FULL, 0);
        assert_eq!(typed(&controller, &raised), CTRL_ALT_DEL);
        assert_eq!(read(&controller, COMMAND) & OUTPUT_FULL, 0);
        (0..100).for_each(|_| controller.press_ctrl_alt_del());
        assert_eq!(typed(&controller, &raised), CTRL_ALT_DEL);
    }

    #[test]
    fn keyboard_answers_its_driver() {
        let (controller, _, raised) = controller_with_line();
        for (bytes, answer) in [
            (&[0xf2][..], &[0xfa, 0xab, 0x83][..]),
            (&[0xff], &[0xfa, 0xaa]),
            (&[0xed, 0], &[0xfa, 0xfa]),
            (&[0xf0, 0], &[0xfa, 0xfa, 2]),
            (&[0xee], &[0xee]),
            (&[0xf4], &[0xfa]),
        ] {
            bytes.iter().for_each(|byte| controller.write(DATA, &[*byte]));
            assert_eq!(typed(&controller, &raised), answer, "{bytes:x?}");
        }
        // A controller's answer raises no interrupt.
        assert_eq!(ask(&controller, 0xaa, None), Some(0x55));
        assert_eq!(raised.take(), 0);
    }

    #[test]
    fn flood_without_a_reader_keeps_few_answers() {
        let (controller, _) = controller();
        (0..100_000).for_each(|_| controller.write(COMMAND, &[0x20]));
        for _ in 0..ANSWERS_MAX {
            assert_ne!(read(&controller, COMMAND) & OUTPUT_FULL, 0);
            read(&controller, DATA);
        }
        assert_eq!(read(&controller, COMMAND) & OUTPUT_FULL, 0);
    }

    #[test]
    fn access_of_other_sizes_reads_zero_and_does_nothing() {
        let (controller, resets) = controller();
        controller.write(COMMAND, &[0xfe, 0xfe]);
        let mut data = [0xee; 4];
        controller.read(COMMAND, &mut data);
        assert_eq!(data, [0; 4]);
        assert_eq!(resets.load(Ordering::Relaxed), 0);
    }
}
