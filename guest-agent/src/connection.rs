//! The connection of one client: its socket, partly received frames, frames to be sent.
//!
//! It knows its streams only by number; the jobs behind them belong to the server.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use pvmm_guest_agent::limits::MAX_DATA;
use pvmm_guest_agent::message::{Code, Goodbye};
use pvmm_guest_agent::{Decoder, Kind};

use crate::outbox::Outbox;
use crate::sys;

/// Two packets of the guest's kernel: below this, setting the low-water mark costs more than it
/// saves.
const WORTH_WAITING: usize = 8 << 10;

/// A stream of a connection.
#[derive(Debug, Clone, Copy)]
pub struct StreamId {
    pub connection: u64,
    pub number: u32,
}

pub struct Connection {
    pub socket: OwnedFd,
    pub decoder: Decoder,
    pub out: Outbox,
    pub readable: bool,
    pub writable: bool,
    pub hung_up: bool,
    /// The number of bytes at which the socket becomes readable.
    pub low_water: usize,
    /// Something waits for room among the frames to be sent.
    pub pressed: bool,
    /// The hello was received and answered.
    pub greeted: bool,
    /// The client connected to the control port.
    pub control: bool,
    /// The open streams and their jobs.
    pub streams: BTreeMap<u32, u64>,
    /// The highest stream number that was opened; numbers only rise.
    pub last_stream: u32,
}

impl Connection {
    pub fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            decoder: Decoder::default(),
            out: Outbox::default(),
            readable: false,
            writable: true,
            hung_up: false,
            low_water: 1,
            pressed: false,
            greeted: false,
            control: false,
            streams: BTreeMap::new(),
            last_stream: 0,
        }
    }

    /// Makes the socket wait for the rest of a partly received frame: a large frame comes in many
    /// packets, and waking up for each of them costs more than everything else.
    pub fn await_rest(&mut self) {
        let wanted = match self.decoder.missing() {
            few if few < WORTH_WAITING => 1,
            many => many.min(MAX_DATA),
        };
        if wanted != self.low_water {
            // Bytes that came below the old mark have made no edge.
            self.readable |= wanted < self.low_water;
            self.low_water = wanted;
            sys::set_low_water(&self.socket, wanted as u32);
        }
    }

    /// Sends a goodbye with the reason, as far as it can be sent at once. The connection ends.
    pub fn say_goodbye(&mut self, code: Code, message: &str) {
        let goodbye = Goodbye { code, message: message.to_owned() };
        self.out.control(Kind::Goodbye, 0, &goodbye);
        let _ = self.out.flush(&self.socket);
    }
}
