//! A random walk over the multiplexer: guest, host and clock act as a script says.
//!
//! After every step the bounds must hold, every byte must be the expected one at its position, and
//! the host must never have sent beyond the guest's credit.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};

use super::{ScriptedHost, ScriptedStream, pattern};
use crate::GuestMemory;
use crate::virtio::chain::Segment;
use crate::virtio::vsock::connection::Pair;
use crate::virtio::vsock::mux::{FIRST_HOST_PORT, Limits, MAX_BURST, Mux, Readiness};
use crate::virtio::vsock::wire::{HEADER_LEN, HOST_CID, Header, Op, TYPE_STREAM};

const CID: u64 = 3;
const BUFFERS_AT: u64 = 0x1_0000;
const BUFFER_STRIDE: u64 = 0x1000;
const PACKET_AT: u64 = 0x4_0000;

/// The guest's state of a connection.
#[derive(Debug, Default)]
struct GuestEnd {
    sent: u64,
    received: u64,
    /// The host's request was not answered yet.
    asked: bool,
    /// The highest position up to which the host was ever allowed to send.
    edge: u64,
}

struct Walk<'a> {
    script: std::slice::Iter<'a, u8>,
    mux: Mux<ScriptedHost>,
    memory: GuestMemory,
    limits: Limits,
    now: Instant,
    ends: HashMap<Pair, GuestEnd>,
}

/// Follows a script to its end, and then lets everything that can still move finish.
pub fn walk(script: &[u8]) {
    let limits = Limits {
        connections: 6,
        resets: 8,
        base_window: 64,
        full_window: 256,
        spare_window: 1024,
        ..Limits::default()
    };
    let host = ScriptedHost::default();
    let mut walk = Walk {
        script: script.iter(),
        mux: Mux::new(CID, host, FIRST_HOST_PORT, limits),
        memory: GuestMemory::from_ranges(&[(GuestAddress(0x1000), 0x10_0000)]).unwrap(),
        limits,
        now: Instant::now(),
        ends: HashMap::new(),
    };
    while walk.step() {
        walk.check();
    }
    walk.settle();
}

impl Walk<'_> {
    fn byte(&mut self) -> Option<u64> {
        self.script.next().map(|byte| u64::from(*byte))
    }

    fn step(&mut self) -> bool {
        let Some(kind) = self.byte() else { return false };
        let Some(choice) = self.byte() else { return false };
        match kind % 16 {
            0 => self.client_comes(choice),
            1..=3 => self.host_writes(choice),
            4 => self.host_reads(choice),
            5 => self.host_goes(choice),
            6..=10 => return self.guest_sends(choice),
            11..=13 => {
                self.guest_offers(choice as usize % (MAX_BURST + 4));
            }
            14 => self.now += Duration::from_millis(choice),
            _ => {
                self.mux.host_mut().serve(choice as u32 % 4);
            }
        }
        self.mux.serve_host(self.now);
        self.watch();
        true
    }

    /// Updates the watched streams as the event loop would.
    fn watch(&mut self) {
        self.mux.take_retired();
        let mut changed = Vec::new();
        self.mux.rewatch(|slot, stream, _known, writable| {
            stream.pipe().slot = Some(slot);
            stream.pipe().watched_for_room = writable;
            changed.push(stream.clone());
            Ok::<(), ()>(())
        });
        // The event loop reports at once what is ready already.
        for stream in changed {
            self.note(&stream);
        }
    }

    fn stream(&mut self, choice: u64) -> Option<ScriptedStream> {
        let streams = &self.mux.host_mut().streams;
        let from = streams.len().saturating_sub(8);
        let recent = &streams[from..];
        recent.get(choice as usize % recent.len().max(1)).cloned()
    }

    /// Reports the readiness that the event loop would report.
    fn note(&mut self, stream: &ScriptedStream) {
        let pipe = stream.pipe();
        let (ended, hung_up) = (pipe.ended, pipe.hung_up);
        let read = ended || !pipe.to_device.is_empty();
        let write = pipe.watched_for_room && pipe.room > 0;
        let slot = pipe.slot.filter(|_| read || write || hung_up);
        drop(pipe);
        // With one reference in the list of all streams and one here, a third is the table's.
        if let Some(slot) = slot.filter(|_| Arc::strong_count(&stream.0) > 2) {
            self.mux.note_ready(slot, Readiness { read, ended, hung_up });
        }
    }

    fn client_comes(&mut self, choice: u64) {
        let lines: [&[u8]; 4] = [b"CONNECT 1\n", b"CONNECT 2\n", b"CONN", b"nonsense\n"];
        let line = lines[choice as usize % lines.len()];
        self.mux.host_mut().client(line);
        self.mux.note_clients();
    }

    fn host_writes(&mut self, choice: u64) {
        let Some(stream) = self.stream(choice) else { return };
        self.write(&stream, choice);
    }

    fn write(&mut self, stream: &ScriptedStream, len: u64) {
        let pipe = stream.pipe();
        // A request line that is not complete yet would take these bytes.
        let whole = pipe.to_device.iter().next_back() != Some(&b'N');
        let open = whole && !pipe.ended;
        drop(pipe);
        if open {
            stream.write(len);
            self.note(stream);
        }
    }

    fn host_reads(&mut self, choice: u64) {
        let Some(stream) = self.stream(choice) else { return };
        stream.pipe().room += choice as usize;
        self.note(&stream);
    }

    fn host_goes(&mut self, choice: u64) {
        let Some(stream) = self.stream(choice).filter(|_| choice > 200) else { return };
        stream.pipe().ended = true;
        stream.pipe().hung_up |= choice > 230;
        self.note(&stream);
    }

    fn guest_sends(&mut self, choice: u64) -> bool {
        let (Some(op), Some(len), Some(credit)) = (self.byte(), self.byte(), self.byte()) else {
            return false;
        };
        if !self.mux.can_take_packet() {
            return true;
        }
        let mut pairs: Vec<Pair> = self.ends.keys().copied().collect();
        pairs.sort();
        let fresh = Pair { host_port: choice as u32 % 5, guest_port: choice as u32 % 7 };
        let pair = *pairs.get(choice as usize % (pairs.len() + 2)).unwrap_or(&fresh);
        let asked = self.ends.get_mut(&pair).is_some_and(|end| std::mem::take(&mut end.asked));
        let op = match op {
            0..=200 if asked => Op::Response as u16,
            0..=100 => Op::Data as u16,
            101..=150 => Op::CreditUpdate as u16,
            151..=180 => Op::Request as u16,
            _ => op as u16 % 9,
        };
        let len = if op == Op::Data as u16 { len } else { len / 250 };
        let end = self.ends.entry(pair).or_default();
        if op == Op::Request as u16 {
            *end = GuestEnd::default();
        }
        let (buf_alloc, fwd_cnt) = match credit {
            0..=240 => (credit as u32, end.received as u32),
            241..=248 => (credit as u32, credit as u32),
            _ => (u32::MAX, (credit as u32) << 24),
        };
        if u64::from(fwd_cnt) <= end.received {
            end.edge = end.edge.max(u64::from(fwd_cnt) + u64::from(buf_alloc));
        }
        let header = Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: pair.guest_port,
            dst_port: pair.host_port,
            len: len as u32,
            kind: TYPE_STREAM,
            op,
            flags: if credit > 200 { credit as u32 % 4 } else { 0 },
            buf_alloc,
            fwd_cnt,
        };
        let mut packet = header.encode().to_vec();
        packet.extend((0..len).map(|at| pattern(end.sent + at)));
        if op == Op::Data as u16 {
            end.sent += len;
        }
        self.memory.write_slice(&packet, GuestAddress(PACKET_AT)).unwrap();
        let whole = Segment { address: GuestAddress(PACKET_AT), len: packet.len() as u32 };
        self.mux.take_packet(self.now, &self.memory, &[whole]);
        self.mux.serve_host(self.now);
        self.watch();
        true
    }

    /// Lets the device fill up to `count` buffers. Returns how many it filled.
    fn guest_offers(&mut self, count: usize) -> usize {
        let buffer = |index: usize| Segment {
            address: GuestAddress(BUFFERS_AT + BUFFER_STRIDE * index as u64),
            len: HEADER_LEN as u32 + 30 - 29 * (index as u32 % 2),
        };
        let (mut left, mut total, mut idle) = (count, 0, 0);
        while left > 0 {
            let wanted = self.mux.buffers_wanted();
            if wanted == 0 {
                break;
            }
            let segments: Vec<[Segment; 1]> = (0..wanted.min(left)).map(|i| [buffer(i)]).collect();
            let buffers: Vec<&[Segment]> = segments.iter().map(|s| &s[..]).collect();
            let mut filled = Vec::new();
            self.mux.fill(self.now, &self.memory, &buffers, &mut filled);
            assert!(filled.len() <= buffers.len());
            idle = if filled.is_empty() { idle + 1 } else { 0 };
            assert!(idle <= 2 * self.limits.connections, "turns that do nothing");
            for (segment, len) in segments.iter().zip(&filled) {
                self.guest_receives(segment[0], *len);
            }
            left -= filled.len();
            total += filled.len();
        }
        total
    }

    fn guest_receives(&mut self, buffer: Segment, len: u32) {
        assert!(len <= buffer.len);
        let mut packet = vec![0; len as usize];
        self.memory.read_slice(&mut packet, buffer.address).unwrap();
        let payload = packet.split_off(HEADER_LEN);
        let header = Header::decode(&packet.try_into().unwrap());
        assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, CID));
        assert_eq!(header.len as usize, payload.len());
        let pair = Pair { host_port: header.src_port, guest_port: header.dst_port };
        match Op::from_raw(header.op).unwrap() {
            Op::Request => {
                self.ends.insert(pair, GuestEnd { asked: true, ..GuestEnd::default() });
            }
            Op::Reset => {
                self.ends.remove(&pair);
            }
            Op::Data => {
                let end = self.ends.get_mut(&pair).expect("data for a connection nobody has");
                for byte in payload {
                    assert_eq!(byte, pattern(end.received), "wrong byte for the guest");
                    end.received += 1;
                }
                assert!(end.received <= end.edge, "sent beyond credit");
            }
            _ => {}
        }
    }

    fn check(&self) {
        let Limits { connections, base_window, spare_window, resets, .. } = self.limits;
        assert!(self.mux.len() <= connections);
        assert!(self.mux.held() <= connections * base_window as usize + spare_window as usize);
        assert!(self.mux.owed_after_restore().len() <= resets + 2 * connections);
    }

    /// Checks that with room, credit and buffers for all, nothing is left over, and one more byte
    /// of each host socket arrives.
    fn settle(&mut self) {
        for stream in self.mux.host_mut().streams.clone() {
            stream.pipe().room = 1 << 30;
            self.note(&stream);
        }
        for pair in self.ends.keys().copied().collect::<Vec<_>>() {
            self.guest_credits(pair);
        }
        self.rest();
        assert_eq!(self.mux.held(), 0, "bytes for a host that has room");
        for index in 0..self.mux.host_mut().streams.len() {
            let stream = self.mux.host_mut().streams[index].clone();
            self.write(&stream, 1);
        }
        self.rest();
        assert_eq!(self.mux.unread_pairs(), [], "bytes for a guest that has room");
        self.check();
    }

    fn rest(&mut self) {
        loop {
            let more = self.mux.serve_host(self.now);
            self.watch();
            if self.guest_offers(64) == 0 && !more {
                return;
            }
        }
    }

    fn guest_credits(&mut self, pair: Pair) {
        let Some(end) = self.ends.get_mut(&pair) else { return };
        end.edge = end.received + u64::from(u32::MAX / 4);
        let header = Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: pair.guest_port,
            dst_port: pair.host_port,
            kind: TYPE_STREAM,
            op: Op::CreditUpdate as u16,
            buf_alloc: u32::MAX / 4,
            fwd_cnt: end.received as u32,
            ..Header::default()
        };
        if self.mux.knows(pair) {
            self.memory.write_slice(&header.encode(), GuestAddress(PACKET_AT)).unwrap();
            let whole = Segment { address: GuestAddress(PACKET_AT), len: HEADER_LEN as u32 };
            self.mux.take_packet(self.now, &self.memory, &[whole]);
        }
    }
}
