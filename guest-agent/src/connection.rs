//! One client's connection: its socket, what has come half-way, what waits to be sent.
//! It knows its streams only by number; the jobs behind them belong to the server.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::Instant;

use pvmm_guest_agent::message::{Code, Goodbye};
use pvmm_guest_agent::{Decoder, Kind};

use crate::outbox::Outbox;

pub struct Connection {
    pub socket: OwnedFd,
    pub decoder: Decoder,
    pub out: Outbox,
    pub readable: bool,
    pub writable: bool,
    pub hung_up: bool,
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
            pressed: false,
            greeted: false,
            control: false,
            streams: BTreeMap::new(),
            last_stream: 0,
            deadline: None,
        }
    }

    /// Says why and sends what can be sent at once; the connection is over.
    pub fn say_goodbye(&mut self, code: Code, message: &str) {
        let goodbye = Goodbye { code, message: message.to_owned() };
        self.out.control(Kind::Goodbye, 0, &goodbye);
        let _ = self.out.flush(&self.socket);
    }
}
