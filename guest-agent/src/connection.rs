//! One client's connection: its socket, what has come half-way, what waits to be sent.
//! It knows its streams only by number; the jobs behind them belong to the server.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Instant;

use pvmm_guest_agent::limits::MAX_DATA;
use pvmm_guest_agent::message::{Code, Goodbye};
use pvmm_guest_agent::{Decoder, Kind};

use crate::outbox::Outbox;
use crate::sys;

/// Two packets of the guest's kernel: for less, the call that sets the mark is not worth its while.
const WORTH_WAITING: usize = 8 << 10;

pub struct Connection {
    pub socket: OwnedFd,
    pub decoder: Decoder,
    pub out: Outbox,
    pub readable: bool,
    pub writable: bool,
    pub hung_up: bool,
    /// The socket becomes readable when it has so many bytes.
    pub low_water: usize,
    /// Something waits for room among the frames to be sent.
    pub pressed: bool,
    /// The hello has come and was answered.
    pub greeted: bool,
    /// It came to the control port.
    pub control: bool,
    /// Open streams and their jobs.
    pub streams: BTreeMap<u32, u64>,
    /// The highest stream number that was opened; numbers only rise.
    pub last_stream: u32,
    pub deadline: Option<Instant>,
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
            deadline: None,
        }
    }

    /// Has the socket wait for the rest of a frame that has begun: a large one comes in many packets, and
    /// waking up for each of them costs more than all else.
    pub fn await_rest(&mut self) {
        let wanted = match self.decoder.missing() {
            few if few < WORTH_WAITING => 1,
            many => many.min(MAX_DATA),
        };
        if wanted != self.low_water {
            // What came below the old mark has made no edge.
            self.readable |= wanted < self.low_water;
            self.low_water = wanted;
            sys::set_low_water(&self.socket, wanted as u32);
        }
    }

    /// Says why and sends what can be sent at once; the connection is over.
    pub fn say_goodbye(&mut self, code: Code, message: &str) {
        let goodbye = Goodbye { code, message: message.to_owned() };
        self.out.control(Kind::Goodbye, 0, &goodbye);
        let _ = self.out.flush(&self.socket);
    }
}
