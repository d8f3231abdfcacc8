//! Handles events of host sockets and deadlines.
//!
//! Readiness is only recorded when it is reported and acted upon in `serve_host`, so a quiesced
//! device can record it without touching anything.

use std::io::ErrorKind;
use std::net::Shutdown;
use std::time::Instant;

use super::Mux;
use super::table::{ConnectionEntry, Stage};
use crate::virtio::vsock::connection::{Connection, Phase};
use crate::virtio::vsock::host::{Host, Line, MAX_LINE, Stream, parse_line};

/// Clients accepted and slots served before the other devices are served.
const MAX_CLIENTS: usize = 64;
const MAX_TOUCHED: usize = 64;

/// The readiness of a host socket as the event loop reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// There are bytes or the end of the stream to read.
    pub read: bool,
    /// The peer will send no more.
    pub ended: bool,
    /// The peer closed both directions.
    pub hung_up: bool,
}

impl<H: Host> Mux<H> {
    /// Records that clients are waiting.
    pub fn note_clients(&mut self) {
        self.clients_waiting = true;
    }

    /// Records that the socket in `slot` is ready.
    pub fn note_ready(&mut self, slot: usize, readiness: Readiness) {
        let Some(entry) = self.table.get(slot) else { return };
        entry.hung_up |= readiness.hung_up;
        entry.ended |= readiness.ended || readiness.hung_up;
        if let Stage::Live(connection) = &mut entry.stage {
            connection.readable |= readiness.read || readiness.ended || readiness.hung_up;
        }
        self.table.touch(slot);
    }

    /// Handles deadlines, new clients and ready sockets. Returns true if some are left for another
    /// turn.
    pub fn serve_host(&mut self, now: Instant) -> bool {
        self.expire(now);
        let more_clients = self.accept_clients(now);
        for _ in 0..MAX_TOUCHED {
            let Some(slot) = self.table.next_touched() else { return more_clients };
            self.serve_slot(now, slot);
        }
        true
    }

    fn serve_slot(&mut self, now: Instant, slot: usize) {
        let Some(entry) = self.table.get(slot) else { return };
        match &mut entry.stage {
            Stage::Client => self.read_line(now, slot),
            Stage::Live(connection) => {
                let waits = matches!(connection.phase, Phase::Requested { .. });
                if waits && entry.hung_up {
                    return self.abort(slot);
                }
                if entry.hung_up {
                    connection.host_hung_up();
                }
                self.flush(now, slot);
                self.queue_if_wanted(slot);
            }
            Stage::Draining => self.flush(now, slot),
        }
    }

    fn accept_clients(&mut self, now: Instant) -> bool {
        for _ in 0..MAX_CLIENTS {
            if !self.clients_waiting {
                return false;
            }
            match self.host.accept() {
                Ok(None) => self.clients_waiting = false,
                // Closing it notifies the client at once; in the backlog it would wait.
                Ok(Some(_)) if self.table.is_full() => self.counts.capped += 1,
                Ok(Some(stream)) => {
                    let slot = self.table.insert(stream, now + self.limits.half_open);
                    // A client has usually sent its request line already.
                    self.table.touch(slot);
                }
                Err(_) => {
                    // Out of descriptors or memory: this may pass, but retrying at once would spin.
                    self.clients_waiting = false;
                    self.accept_again = Some(now + self.limits.accept_retry);
                }
            }
        }
        self.clients_waiting
    }

    /// Closes the connections of waiting clients, when there is no guest to connect to.
    pub fn turn_clients_away(&mut self) {
        for _ in 0..MAX_CLIENTS {
            if !matches!(self.host.accept(), Ok(Some(_))) {
                break;
            }
        }
    }

    fn read_line(&mut self, now: Instant, slot: usize) {
        let Some(entry) = self.table.get(slot) else { return };
        let mut line = [0; MAX_LINE];
        let parsed = match entry.stream.peek(&mut line) {
            // The end of the stream before a newline.
            Ok(0) => Line::Bad,
            Ok(len) => parse_line(&line[..len]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Line::Partial,
            Err(_) => Line::Bad,
        };
        match parsed {
            Line::Partial if !entry.ended => {}
            Line::Connect { port, len } if entry.stream.skip(len).is_ok() => {
                let window = self.table.reserve_window(slot);
                let pair = self.allocate_pair(port);
                self.table.connect(slot, Connection::from_host(pair, window));
                self.table.set_deadline(slot, Some(now + self.limits.half_open));
                // The socket may have hung up since, and its event was already consumed.
                self.table.touch(slot);
                self.table.queue(slot);
            }
            _ => self.table.remove(slot),
        }
    }

    /// Writes the backlog to the host socket.
    pub(super) fn flush(&mut self, now: Instant, slot: usize) {
        let Some(entry) = self.table.get(slot) else { return };
        let before = entry.backlog.len();
        while !entry.backlog.is_empty() {
            let (first, second) = entry.backlog.as_slices();
            match entry.stream.send(first, second) {
                Ok(len) => {
                    entry.backlog.drain(..len);
                    if let Stage::Live(connection) = &mut entry.stage {
                        connection.window.forward(len as u32);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => {
                    entry.drop_backlog();
                    break;
                }
            }
        }
        let (left, draining) = (entry.backlog.len(), matches!(entry.stage, Stage::Draining));
        if left == 0 && before > 0 {
            // Most connections never need a backlog again, so its memory is freed.
            entry.backlog = Default::default();
            entry.end_writing_if_done();
            self.table.rewatch(slot);
        }
        if draining && left == 0 {
            self.table.remove(slot);
        } else if draining && left < before {
            self.table.set_deadline(slot, Some(now + self.limits.drain));
        }
    }

    /// Queues a connection if it has a packet for the guest.
    pub(super) fn queue_if_wanted(&mut self, slot: usize) {
        let entry = self.table.get(slot);
        if entry
            .and_then(ConnectionEntry::connection)
            .is_some_and(|connection| connection.wants_to_send())
        {
            self.table.queue(slot);
        }
    }

    fn expire(&mut self, now: Instant) {
        if self.accept_again.is_some_and(|again| again <= now) {
            self.accept_again = None;
            self.clients_waiting = true;
        }
        while let Some(slot) = self.table.next_expired(now) {
            self.counts.expired += 1;
            self.abort(slot);
        }
    }
}

impl<S: Stream> ConnectionEntry<S> {
    /// Drops the backlog of a host socket that accepts no more bytes. It counts as forwarded, so
    /// that the guest does not wait for credit.
    pub(super) fn drop_backlog(&mut self) {
        let len = self.backlog.len() as u32;
        self.backlog.clear();
        if let Stage::Live(connection) = &mut self.stage {
            connection.window.forward(len);
            connection.host_deaf();
        }
    }

    /// Shuts the host socket down for writing once the guest has ended sending and everything is
    /// written.
    pub(super) fn end_writing_if_done(&mut self) {
        let done = match &self.stage {
            Stage::Live(connection) => connection.is_guest_done_sending(),
            Stage::Client | Stage::Draining => false,
        };
        if done && self.backlog.is_empty() {
            self.stream.shutdown(Shutdown::Write);
        }
    }
}
