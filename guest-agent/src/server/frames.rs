//! Handles each frame that a client sends.
//!
//! Rules of the protocol that need state are enforced here; breaking one ends the connection.

use std::io;
use std::time::Instant;

use pvmm_guest_agent::frame::{Frame, Kind};
use pvmm_guest_agent::limits::{FRAME_TIME, HELLO_TIME, VERSION};
use pvmm_guest_agent::message::{Code, Hello, Signal, WindowSize};
use pvmm_guest_agent::{Channel, decode};

use super::Server;
use crate::channel::Pumped;
use crate::connection::StreamId;
use crate::token::Token;
use crate::{requests, sys};

/// Bytes read from a socket at once.
const READ_BYTES: usize = 256 << 10;

/// Why a connection is ended: the client's error, as text for its log.
type ProtocolFault = (Code, String);

fn fault(message: impl Into<String>) -> ProtocolFault {
    (Code::Protocol, message.into())
}

impl Server {
    /// Reads once from a connection and acts on every whole frame.
    pub(super) fn read_connection(&mut self, id: u64) -> Pumped {
        let Some(connection) = self.agent.connections.get_mut(&id) else { return Pumped::Waiting };
        connection.pressed |= connection.out.is_clogged();
        if !connection.readable || connection.out.is_clogged() {
            return Pumped::Waiting;
        }
        let mut bytes = std::mem::take(&mut self.agent.scratch);
        bytes.clear();
        let read = sys::read_onto(&connection.socket, &mut bytes, READ_BYTES);
        let step = match read {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                connection.readable = false;
                Pumped::Waiting
            }
            Ok(0) | Err(_) => {
                self.jobs.drop_connection(&mut self.agent, id);
                Pumped::Waiting
            }
            Ok(count) => {
                // As with pipes: a short read has emptied the socket, except for an announced end.
                connection.readable = count == READ_BYTES || connection.hung_up;
                self.take_bytes(id, &bytes);
                match self.agent.connections.get_mut(&id) {
                    Some(connection) => {
                        connection.await_rest();
                        if connection.readable { Pumped::More } else { Pumped::Waiting }
                    }
                    None => Pumped::Waiting,
                }
            }
        };
        if self.agent.scratch.capacity() < bytes.capacity() {
            self.agent.scratch = bytes;
        }
        step
    }

    fn take_bytes(&mut self, id: u64, mut bytes: &[u8]) {
        let Some(connection) = self.agent.connections.get_mut(&id) else { return };
        let mut decoder = std::mem::take(&mut connection.decoder);
        let mut progressed = false;
        let result = loop {
            match decoder.next(&mut bytes) {
                Ok(Some(frame)) => {
                    progressed = true;
                    let opened = frame.header.kind == Kind::Open;
                    if let Err(fault) = self.take_frame(id, frame) {
                        break Err(fault);
                    }
                    if opened {
                        // Starting a program takes a while; a client that sent a hundred must not
                        // be left without any answer until the last one runs.
                        self.flush(id);
                    }
                }
                Ok(None) => break Ok(()),
                Err(e) => break Err(fault(e.to_string())),
            }
        };
        if let Some(connection) = self.agent.connections.get_mut(&id) {
            connection.decoder = decoder;
        }
        match result {
            Ok(()) => self.time_frame(id, progressed),
            Err((code, why)) => self.expel(id, code, &why),
        }
    }

    fn take_frame(&mut self, id: u64, frame: Frame<'_>) -> Result<(), ProtocolFault> {
        let Some(connection) = self.agent.connections.get_mut(&id) else { return Ok(()) };
        let stream = frame.header.stream;
        match frame.header.kind {
            Kind::Extension(_) => return Ok(()),
            Kind::Hello if !connection.greeted => return self.greet(id, frame.payload),
            _ if !connection.greeted => return Err(fault("the first frame must be a hello")),
            Kind::Goodbye => return Err(fault("goodbye")),
            Kind::Open if stream > connection.last_stream => {
                connection.last_stream = stream;
                let id = StreamId { connection: id, number: stream };
                requests::open(&mut self.agent, &mut self.jobs, id, frame.payload);
                return Ok(());
            }
            Kind::Data | Kind::Credit | Kind::Signal | Kind::Resize | Kind::Cancel => {}
            kind => return Err(fault(format!("{kind:?} is not allowed here"))),
        }
        if stream > connection.last_stream {
            return Err(fault(format!("stream {stream} was never opened")));
        }
        // A frame for an ended stream was sent before its outcome arrived: nothing to do.
        let Some(job) = connection.streams.get(&stream).copied() else { return Ok(()) };
        match frame.header.kind {
            Kind::Data => self.take_data(id, job, frame),
            Kind::Credit => self.take_credit(job, frame),
            Kind::Signal => {
                let signal: Signal = decode(frame.payload).map_err(|e| fault(e.to_string()))?;
                self.take_signal(job, signal)
            }
            Kind::Resize => {
                let size = decode(frame.payload).map_err(|e| fault(e.to_string()))?;
                self.take_resize(job, size)
            }
            _ => {
                self.jobs.step(&mut self.agent, job, |job, agent| job.cancel(agent));
                Ok(())
            }
        }
    }

    fn greet(&mut self, id: u64, payload: &[u8]) -> Result<(), ProtocolFault> {
        let hello: Hello = decode(payload).map_err(|e| fault(e.to_string()))?;
        if hello.min_version > VERSION || hello.max_version < VERSION {
            let why = format!("this agent speaks version {VERSION}");
            return Err((Code::Version, why));
        }
        let welcome = requests::welcome(&self.agent);
        if let Some(connection) = self.agent.connections.get_mut(&id) {
            connection.greeted = true;
            connection.out.control(Kind::Welcome, 0, &welcome);
        }
        self.agent.deadlines.set(Token::Connection(id), None);
        Ok(())
    }

    fn take_data(&mut self, id: u64, number: u64, frame: Frame<'_>) -> Result<(), ProtocolFault> {
        if frame.header.channel() != Channel::Input {
            return Err(fault("a client sends data only on the input channel"));
        }
        let stream = frame.header.stream;
        let Some(connection) = self.agent.connections.get_mut(&id) else { return Ok(()) };
        let no_input = || fault(format!("stream {stream} has no input"));
        let job = self.jobs.get_mut(number).ok_or_else(no_input)?;
        let sink = job.stream().sink.as_mut().ok_or_else(no_input)?;
        if sink.has_ended() {
            return Err(fault(format!("data after the end of stream {stream}'s input")));
        }
        sink.accept(frame.payload, frame.header.ends(), &mut connection.out, stream)
            .map_err(|e| fault(e.to_string()))?;
        let over = sink.is_closed();
        if frame.header.ends() {
            job.input_ended(&mut self.agent);
        }
        if over {
            self.jobs.step(&mut self.agent, number, |job, _| job.progress());
        }
        Ok(())
    }

    fn take_credit(&mut self, number: u64, frame: Frame<'_>) -> Result<(), ProtocolFault> {
        let job = self.jobs.get_mut(number);
        let granted = job.and_then(|job| job.grant(frame.header.channel(), frame.credit()));
        let granted =
            granted.ok_or_else(|| fault("credit for a channel the stream does not have"))?;
        granted.map_err(|e| fault(e.to_string()))?;
        self.agent.wake_outputs(number);
        Ok(())
    }

    fn take_signal(&mut self, job: u64, signal: Signal) -> Result<(), ProtocolFault> {
        if !(1..=libc::SIGRTMAX()).contains(&signal.signal) {
            return Err(fault(format!("there is no signal {}", signal.signal)));
        }
        if let Some(job) = self.jobs.get_mut(job) {
            job.signal(signal, &self.agent);
        }
        Ok(())
    }

    fn take_resize(&mut self, job: u64, size: WindowSize) -> Result<(), ProtocolFault> {
        let job = self.jobs.get_mut(job);
        job.map_or(Ok(()), |job| job.resize(size, &self.agent)).map_err(fault)
    }

    /// Sends the waiting frames of one connection; `flush_all` detects whether it is lost.
    fn flush(&mut self, id: u64) {
        if let Some(connection) = self.agent.connections.get_mut(&id).filter(|c| c.writable) {
            connection.writable = connection.out.flush(&connection.socket).unwrap_or(true);
        }
    }

    /// Sets or clears the deadline for the rest of a partly received frame.
    fn time_frame(&mut self, id: u64, progressed: bool) {
        let Some(connection) = self.agent.connections.get(&id) else { return };
        let deadline = self.agent.deadlines.get(Token::Connection(id));
        let begun = connection.decoder.in_frame();
        if !connection.greeted {
            // A client may take its time before its first byte, but not for the rest of its hello.
            let rest = begun.then(|| Instant::now() + HELLO_TIME);
            if rest.is_some_and(|rest| deadline.is_none_or(|at| rest < at)) {
                self.agent.deadlines.set(Token::Connection(id), rest);
            }
            return;
        }
        if begun && !progressed && deadline.is_some() {
            return;
        }
        let deadline = begun.then(|| Instant::now() + FRAME_TIME);
        self.agent.deadlines.set(Token::Connection(id), deadline);
    }

    /// Ends a connection whose client broke the protocol, with a goodbye.
    pub(super) fn expel(&mut self, id: u64, code: Code, why: &str) {
        if let Some(connection) = self.agent.connections.get_mut(&id) {
            connection.say_goodbye(code, why);
            self.jobs.drop_connection(&mut self.agent, id);
        }
    }
}
