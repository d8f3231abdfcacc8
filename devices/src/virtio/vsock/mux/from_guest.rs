//! Handles packets from the guest.
//!
//! The header is read once and checked here and in `connection.rs`. The payload goes from guest
//! memory straight to the host socket, and only what the socket does not accept is copied.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::time::Instant;

use super::Mux;
use super::table::Stage;
use crate::GuestMemory;
use crate::virtio::chain::{self, Segment};
use crate::virtio::vsock::connection::{Connection, Pair, Phase, Verdict};
use crate::virtio::vsock::host::{Host, Stream};
use crate::virtio::vsock::state::OwedReset;
use crate::virtio::vsock::wire::{HEADER_LEN, HOST_CID, Header, MAX_PAYLOAD, Op, TYPE_STREAM};

impl<H: Host> Mux<H> {
    /// Returns whether another packet can be taken: each may cause a reset, and their number is
    /// bounded.
    pub fn can_take_packet(&self) -> bool {
        self.resets.len() < self.limits.resets
    }

    /// Handles one packet, which is all of `segments`. Returns false if the guest should not have
    /// sent it.
    pub fn take_packet(
        &mut self,
        now: Instant,
        memory: &GuestMemory,
        segments: &[Segment],
    ) -> bool {
        let before = self.counts;
        self.judge_packet(now, memory, segments);
        (before.dropped, before.refused) == (self.counts.dropped, self.counts.refused)
    }

    fn judge_packet(&mut self, now: Instant, memory: &GuestMemory, segments: &[Segment]) {
        let mut raw = [0; HEADER_LEN];
        if chain::read_at(memory, segments, 0, &mut raw) < HEADER_LEN {
            self.counts.dropped += 1;
            return;
        }
        let header = Header::decode(&raw);
        if header.src_cid != self.guest_cid || header.dst_cid != HOST_CID {
            self.counts.dropped += 1;
            return;
        }
        let pair = Pair { host_port: header.dst_port, guest_port: header.src_port };
        let payload = chain::total_len(segments) - HEADER_LEN as u64;
        let sound = header.kind == TYPE_STREAM
            && header.len <= MAX_PAYLOAD
            && u64::from(header.len) == payload;
        match (Op::from_raw(header.op), self.table.find(pair)) {
            // A reset is never answered, whatever its other fields, or two ends would reset each
            // other for ever.
            (Some(Op::Reset), None) => {}
            (Some(Op::Reset), Some(slot)) => self.finish(now, slot),
            (Some(op), Some(slot)) if sound => {
                self.take_known(now, memory, segments, slot, op, &header)
            }
            (Some(Op::Request), None) if sound && header.len == 0 => self.open(now, pair, &header),
            (_, Some(slot)) => {
                self.counts.refused += 1;
                self.abort(slot);
            }
            (_, None) => self.refuse(OwedReset { kind: header.kind, ..OwedReset::stream(pair) }),
        }
    }

    fn take_known(
        &mut self,
        now: Instant,
        memory: &GuestMemory,
        segments: &[Segment],
        slot: usize,
        op: Op,
        header: &Header,
    ) {
        let Some(entry) = self.table.get(slot) else { return };
        let Some(connection) = entry.connection() else { return };
        let verdict = connection.take(op, header);
        match verdict {
            Verdict::Keep => {}
            Verdict::Opened => self.answer_client(slot),
            Verdict::Deliver => self.deliver(memory, segments, slot, header.len),
            Verdict::HalfClosed => {
                if connection.is_guest_deaf() {
                    entry.stream.shutdown(Shutdown::Read);
                }
                entry.end_writing_if_done();
            }
            Verdict::Finish => {
                let pair = connection.pair;
                self.finish(now, slot);
                self.resets.push_back(OwedReset::stream(pair));
            }
            Verdict::Vanish => self.finish(now, slot),
            Verdict::Break => {
                self.counts.refused += 1;
                self.abort(slot);
            }
        }
        self.watch_the_clock(now, slot);
        self.queue_if_wanted(slot);
    }

    /// Opens a connection to a port of the host at the guest's request.
    fn open(&mut self, now: Instant, pair: Pair, request: &Header) {
        // The guest reuses the ports, so a reset still owed for them is obsolete.
        self.resets.retain(|reset| reset.pair() != pair);
        if self.table.is_full() {
            self.counts.capped += 1;
            return self.refuse(OwedReset::stream(pair));
        }
        let Ok(stream) = self.host.dial(pair.host_port) else {
            return self.refuse(OwedReset::stream(pair));
        };
        let slot = self.table.insert(stream, now + self.limits.half_open);
        let window = self.table.reserve_window(slot);
        self.table.connect(slot, Connection::from_guest(pair, window, request));
        self.table.queue(slot);
    }

    fn refuse(&mut self, reset: OwedReset) {
        self.counts.refused += 1;
        self.resets.push_back(reset);
    }

    /// Sends the answer to a client whose connection the guest accepted.
    fn answer_client(&mut self, slot: usize) {
        let Some(entry) = self.table.get(slot) else { return };
        let Some(connection) = entry.connection() else { return };
        let answer = format!("OK {}\n", connection.pair.host_port);
        let sent = entry.stream.send(answer.as_bytes(), &[]);
        // Nothing was written to this socket before, so it has room unless its other end is gone.
        if !sent.is_ok_and(|len| len == answer.len()) {
            self.abort(slot);
        }
    }

    fn deliver(&mut self, memory: &GuestMemory, segments: &[Segment], slot: usize, len: u32) {
        let Some(entry) = self.table.get(slot) else { return };
        let Stage::Live(connection) = &mut entry.stage else { return };
        if connection.is_host_deaf() {
            connection.window.forward(len);
            return;
        }
        let mut taken = 0;
        if entry.backlog.is_empty() && len > 0 {
            let payload: Vec<Segment> =
                chain::slice(segments, HEADER_LEN as u64, u64::from(len)).collect();
            match entry.stream.send_guest(memory, &payload) {
                Ok(sent) => taken = sent as u32,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => {
                    connection.window.forward(len);
                    connection.host_deaf();
                    return;
                }
            }
            connection.window.forward(taken);
        }
        let left = (len - taken) as usize;
        if left > 0 {
            self.scratch.resize(MAX_PAYLOAD as usize, 0);
            let from = HEADER_LEN as u64 + u64::from(taken);
            let copied = chain::read_at(memory, segments, from, &mut self.scratch[..left]);
            entry.backlog.extend(&self.scratch[..copied]);
            self.table.rewatch(slot);
        }
    }

    /// Ends a connection that the guest has closed: its ports are free, its last bytes still go to
    /// the host.
    fn finish(&mut self, now: Instant, slot: usize) {
        self.table.disconnect(slot);
        match self.table.get(slot) {
            Some(entry) if !entry.backlog.is_empty() => {
                entry.stream.shutdown(Shutdown::Read);
                self.table.set_deadline(slot, Some(now + self.limits.drain));
            }
            _ => self.table.remove(slot),
        }
    }

    /// Sets a deadline on a connection while the guest owes an action, and clears it otherwise.
    pub(super) fn watch_the_clock(&mut self, now: Instant, slot: usize) {
        let Some(entry) = self.table.get(slot) else { return };
        let Stage::Live(connection) = &entry.stage else { return };
        let owes = connection.phase != Phase::Open
            || connection.credit.is_impossible()
            || connection.awaits_reset();
        let running = entry.has_deadline();
        if !owes && running {
            self.table.set_deadline(slot, None);
        } else if owes && !running {
            self.table.set_deadline(slot, Some(now + self.limits.half_open));
        }
    }
}
