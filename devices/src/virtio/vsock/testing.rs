//! Scripted host sockets, and a walk over the multiplexer with them, for tests and fuzz targets.
//!
//! The sockets check what they are given: byte number n of a stream has only one right value.
#![allow(clippy::unwrap_used, reason = "a walk that cannot go on should end its test")]

mod walk;

use std::collections::{HashSet, VecDeque};
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::sync::{Arc, Mutex, MutexGuard};

pub use walk::walk;

use super::host::{Host, Stream};
use crate::GuestMemory;
use crate::virtio::chain::{self, Segment};

/// The peer's end of a host socket, and what the device did at its own end.
#[derive(Debug, Default)]
struct Pipe {
    to_device: VecDeque<u8>,
    written: u64,
    /// Bytes from the device without the answer to a client.
    heard: u64,
    answer_pending: bool,
    room: usize,
    ended: bool,
    hung_up: bool,
    slot: Option<usize>,
    watched_for_room: bool,
}

/// A host socket that follows a script.
#[derive(Clone, Debug)]
pub struct ScriptedStream(Arc<Mutex<Pipe>>);

impl ScriptedStream {
    fn pipe(&self) -> MutexGuard<'_, Pipe> {
        self.0.lock().unwrap()
    }

    /// Writes the next `len` bytes of the stream to the device.
    pub fn write(&self, len: u64) {
        let mut pipe = self.pipe();
        for at in pipe.written..pipe.written + len {
            pipe.to_device.push_back(pattern(at));
        }
        pipe.written += len;
    }

    fn hear(&self, bytes: impl IntoIterator<Item = u8>) -> io::Result<usize> {
        let mut pipe = self.pipe();
        if pipe.hung_up {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let mut taken = 0;
        for byte in bytes {
            if taken == pipe.room {
                break;
            }
            taken += 1;
            if pipe.answer_pending {
                pipe.answer_pending = byte != b'\n';
            } else {
                assert_eq!(byte, pattern(pipe.heard), "wrong byte for the host");
                pipe.heard += 1;
            }
        }
        pipe.room -= taken;
        if taken == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(taken) }
    }
}

impl Stream for ScriptedStream {
    fn peek(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let pipe = self.pipe();
        if pipe.to_device.is_empty() && !pipe.ended {
            return Err(ErrorKind::WouldBlock.into());
        }
        let len = buf.len().min(pipe.to_device.len());
        buf.iter_mut().zip(&pipe.to_device).for_each(|(to, from)| *to = *from);
        Ok(len)
    }

    fn skip(&mut self, len: usize) -> io::Result<()> {
        self.pipe().to_device.drain(..len);
        Ok(())
    }

    fn receive(&mut self, memory: &GuestMemory, into: &[Segment]) -> io::Result<usize> {
        assert!(chain::total_len(into) > 0, "a read of nothing looks like the end");
        let mut pipe = self.pipe();
        if pipe.to_device.is_empty() && !pipe.ended {
            return Err(ErrorKind::WouldBlock.into());
        }
        let len = pipe.to_device.len().min(chain::total_len(into) as usize);
        let bytes: Vec<u8> = pipe.to_device.drain(..len).collect();
        Ok(chain::write_at(memory, into, 0, &bytes))
    }

    fn send_guest(&mut self, memory: &GuestMemory, from: &[Segment]) -> io::Result<usize> {
        let mut bytes = vec![0; chain::total_len(from) as usize];
        chain::read_at(memory, from, 0, &mut bytes);
        self.hear(bytes)
    }

    fn send(&mut self, first: &[u8], second: &[u8]) -> io::Result<usize> {
        self.hear(first.iter().chain(second).copied())
    }

    fn shutdown(&mut self, _how: Shutdown) {}
}

/// Waiting clients, served ports, and every stream that ever existed.
#[derive(Debug, Default)]
pub struct ScriptedHost {
    waiting: VecDeque<ScriptedStream>,
    served: HashSet<u32>,
    streams: Vec<ScriptedStream>,
}

impl ScriptedHost {
    /// Lets the guest connect to `port`.
    pub fn serve(&mut self, port: u32) {
        self.served.insert(port);
    }

    /// Adds a client that connects and writes `line`.
    pub fn client(&mut self, line: &[u8]) -> ScriptedStream {
        let to_device = line.iter().copied().collect();
        let pipe = Pipe { to_device, answer_pending: true, room: 100, ..Pipe::default() };
        let client = self.add(pipe);
        self.waiting.push_back(client.clone());
        client
    }

    fn add(&mut self, pipe: Pipe) -> ScriptedStream {
        let stream = ScriptedStream(Arc::new(Mutex::new(pipe)));
        self.streams.push(stream.clone());
        stream
    }
}

impl Host for ScriptedHost {
    type Stream = ScriptedStream;

    fn accept(&mut self) -> io::Result<Option<ScriptedStream>> {
        Ok(self.waiting.pop_front())
    }

    fn dial(&mut self, port: u32) -> io::Result<ScriptedStream> {
        if !self.served.contains(&port) {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        Ok(self.add(Pipe { room: 100, ..Pipe::default() }))
    }
}

/// Returns the expected byte at a position of a stream.
fn pattern(at: u64) -> u8 {
    (at ^ (at >> 8)) as u8
}
