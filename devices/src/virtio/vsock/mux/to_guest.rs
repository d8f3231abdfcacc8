//! Fills the guest's receive buffers: owed resets first, then the connections in turn.
//!
//! Bytes go from the host socket straight into guest memory, many buffers in one call; nothing is
//! read for which the guest has no credit or no buffer.

use std::io::ErrorKind;
use std::time::Instant;

use super::Mux;
use super::table::{ConnectionEntry, Stage};
use crate::GuestMemory;
use crate::virtio::chain::{self, Segment};
use crate::virtio::vsock::host::{Host, MAX_PIECES, Stream};
use crate::virtio::vsock::wire::{HEADER_LEN, HOST_CID, Header, MAX_PAYLOAD, Op};

/// The smallest usable receive buffer: a header and one byte.
pub const MIN_BUFFER: u64 = HEADER_LEN as u64 + 1;
/// The maximum number of buffers filled by one read: 64 KiB with the 4 KiB buffers of stock
/// drivers.
pub const MAX_BURST: usize = 16;

impl<H: Host> Mux<H> {
    /// Returns how many receive buffers the next turn can use; zero if there is nothing to send.
    pub fn buffers_wanted(&mut self) -> usize {
        if !self.resets.is_empty() {
            return 1;
        }
        while let Some(slot) = self.table.first_queued() {
            if let Some(connection) = self.table.get(slot).and_then(ConnectionEntry::connection) {
                if connection.wants_control() {
                    return 1;
                }
                if connection.may_read() {
                    return connection.burst;
                }
            }
            self.table.unqueue_first();
        }
        0
    }

    /// Takes one turn: fills the first few of `buffers`, each at least `MIN_BUFFER` long, and
    /// appends the length of each to `filled`. It may fill none.
    pub fn fill(
        &mut self,
        now: Instant,
        memory: &GuestMemory,
        buffers: &[&[Segment]],
        filled: &mut Vec<u32>,
    ) {
        let Some(first) = buffers.first() else { return };
        if let Some(reset) = self.resets.pop_front() {
            let header = Header {
                src_port: reset.host_port,
                dst_port: reset.guest_port,
                kind: reset.kind,
                op: Op::Reset as u16,
                ..Header::default()
            };
            self.write_header(memory, first, header);
            filled.push(HEADER_LEN as u32);
            return;
        }
        let Some(slot) = self.table.first_queued() else { return };
        self.table.unqueue_first();
        let control = self
            .table
            .get(slot)
            .and_then(ConnectionEntry::connection)
            .and_then(|c| c.next_control());
        match control {
            Some(header) => {
                self.write_header(memory, first, header);
                filled.push(HEADER_LEN as u32);
                self.watch_the_clock(now, slot);
            }
            None => self.fill_data(memory, buffers, filled, slot),
        }
        self.queue_if_wanted(slot);
    }

    fn fill_data(
        &mut self,
        memory: &GuestMemory,
        buffers: &[&[Segment]],
        filled: &mut Vec<u32>,
        slot: usize,
    ) {
        let Some(entry) = self.table.get(slot) else { return };
        let (ended, hung_up) = (entry.ended, entry.hung_up);
        let Stage::Live(connection) = &mut entry.stage else { return };
        if !connection.may_read() {
            return;
        }
        let mut credit = connection.credit.available();
        let mut rooms = [0; MAX_BURST];
        let mut pieces = Vec::with_capacity(MAX_PIECES);
        for (buffer, room) in buffers.iter().zip(&mut rooms) {
            let (first, most) = (pieces.len(), u64::from(MAX_PAYLOAD.min(credit)));
            let payload = chain::slice(buffer, HEADER_LEN as u64, most);
            pieces.extend(payload.take(MAX_PIECES - first));
            *room = chain::total_len(&pieces[first..]) as u32;
            credit -= *room;
        }
        let wanted: u32 = rooms.iter().sum();
        let mut left = match entry.stream.receive(memory, &pieces) {
            Ok(0) => {
                connection.host_ended();
                if hung_up {
                    connection.host_hung_up();
                }
                return;
            }
            Ok(len) => len as u32,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                connection.readable = false;
                return;
            }
            Err(_) => {
                connection.host_ended();
                connection.host_deaf();
                return;
            }
        };
        let full = left == wanted;
        let mut used = 0;
        for (buffer, room) in buffers.iter().zip(rooms) {
            let len = room.min(left);
            if len == 0 {
                break;
            }
            left -= len;
            used += 1;
            let header = connection.data_header(len);
            write_header(self.guest_cid, memory, buffer, header);
            filled.push(HEADER_LEN as u32 + len);
        }
        if full {
            connection.burst = (connection.burst * 2).min(MAX_BURST);
            return;
        }
        connection.burst = used;
        // A stream that returned less than requested is empty, and a new event reports more. Only
        // its end could be missed, so it is read again if the end was announced.
        connection.readable = ended;
    }

    fn write_header(&self, memory: &GuestMemory, buffer: &[Segment], header: Header) {
        write_header(self.guest_cid, memory, buffer, header);
    }
}

fn write_header(guest_cid: u64, memory: &GuestMemory, buffer: &[Segment], header: Header) {
    let header = Header { src_cid: HOST_CID, dst_cid: guest_cid, ..header };
    chain::write_at(memory, buffer, 0, &header.encode());
}
