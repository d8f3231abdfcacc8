//! Interrupt lines: a device raises a line, and a vCPU gets the message that the I/O APIC has set
//! for it.
//!
//! A line is a number and the table of messages. It needs no registration with the host's kernel:
//! the thread that raises the line sends the message.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The maximum number of lines.
pub const PINS: usize = 64;

/// A message-signalled interrupt, in the format of a local APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub address: u32,
    pub data: u32,
}

impl Message {
    /// Encodes "no message" as zero, which no message is: its address is that of the local APICs.
    fn packed(message: Option<Self>) -> u64 {
        message.map_or(0, |it| u64::from(it.address) << 32 | u64::from(it.data))
    }

    fn unpacked(number: u64) -> Option<Self> {
        let (address, data) = ((number >> 32) as u32, number as u32);
        (number != 0).then_some(Self { address, data })
    }
}

/// Delivers a message to a vCPU.
pub type Deliver = Box<dyn Fn(Message) + Send + Sync>;

/// All lines of a machine: written by the I/O APIC, read by the thread that raises one.
pub struct Lines {
    messages: [AtomicU64; PINS],
    deliver: Deliver,
}

impl Lines {
    /// Creates lines that deliver nothing yet.
    pub fn new(deliver: Deliver) -> Arc<Self> {
        Arc::new(Self { messages: [const { AtomicU64::new(0) }; PINS], deliver })
    }

    /// Makes a line deliver this message, or nothing, from now on.
    pub fn set(&self, pin: usize, message: Option<Message>) {
        if let Some(place) = self.messages.get(pin) {
            place.store(Message::packed(message), Ordering::SeqCst);
        }
    }

    pub fn line(self: &Arc<Self>, pin: u32) -> Line {
        Line { lines: self.clone(), pin: pin as usize }
    }
}

/// One device's end of its line. All interrupts are edge-triggered: raising a line twice delivers
/// two.
#[derive(Clone)]
pub struct Line {
    lines: Arc<Lines>,
    pin: usize,
}

impl Line {
    /// Interrupts the guest. The interrupt is lost if the guest has masked the line, as on a real
    /// chip.
    pub fn raise(&self) {
        let message = self.lines.messages.get(self.pin);
        let message = message.and_then(|place| Message::unpacked(place.load(Ordering::SeqCst)));
        if let Some(message) = message {
            (self.lines.deliver)(message);
        }
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "Line({})", self.pin)
    }
}

/// A line that counts how often it was raised, for tests.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::{Line, Lines, Message};

    /// How often a line was raised since the last `take`.
    #[derive(Clone, Debug, Default)]
    pub struct Raised(Arc<AtomicU64>);

    impl Raised {
        pub fn take(&self) -> u64 {
            self.0.swap(0, Ordering::SeqCst)
        }
    }

    pub fn line() -> (Line, Raised) {
        let raised = Raised::default();
        let count = raised.0.clone();
        let lines = Lines::new(Box::new(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
        }));
        lines.set(0, Some(Message { address: 0xfee0_0000, data: 0x20 }));
        (lines.line(0), raised)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn line_delivers_the_message_that_is_set_and_none_without() {
        let log = Arc::new(Mutex::new(Vec::new()));
        let to = log.clone();
        let lines = Lines::new(Box::new(move |message| to.lock().unwrap().push(message)));
        let line = lines.line(63);
        line.raise();
        let message = Message { address: 0xfee0_3000, data: 0 };
        lines.set(63, Some(message));
        line.raise();
        lines.set(63, None);
        line.raise();
        // No such pins: nothing happens.
        lines.set(64, Some(message));
        lines.line(u32::MAX).raise();
        assert_eq!(*log.lock().unwrap(), [message]);
    }
}
