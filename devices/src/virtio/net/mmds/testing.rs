//! A guest's end of the metadata service, for tests and the fuzz target: a well-behaved client, and
//! a hostile random walk.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::wire::ETHERNET_LEN;
use super::packet::{self, Frame, Outgoing, Peer, SERVICE_MAC, flag};
use super::{CONNECTIONS_MAX, Mmds, MmdsConfig, PORT, RESETS_MAX, SENT_MAX};

/// The guest's hardware address.
pub const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const GUEST_IP: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
// How far the clock moves when nothing else happens: little enough that a client is not given up.
const LATER: Duration = Duration::from_millis(700);

/// A service with some content, and its clock.
pub struct Bench {
    pub mmds: Mmds,
    pub now: Instant,
}

impl Bench {
    pub fn new(config: MmdsConfig) -> Self {
        let mut mmds = Mmds::new(config, GUEST_MAC);
        let long = "x".repeat(20_000);
        mmds.set_content(Arc::new(serde_json::json!({ "id": "i-1", "long": long })));
        Self { mmds, now: Instant::now() }
    }

    /// Returns every frame that the service has for the guest now, each checked.
    pub fn frames(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        while self.mmds.is_ready(self.now) {
            let frame = self.mmds.take_frame().expect("it is ready");
            assert!(frame.len() <= SENT_MAX);
            assert_eq!((&frame[..6], &frame[6..12]), (&GUEST_MAC[..], &SERVICE_MAC[..]));
            frames.push(frame);
            // All connections with everything that their windows can hold, in the smallest
            // segments.
            assert!(frames.len() < CONNECTIONS_MAX * 1500, "sends without end");
        }
        assert!(self.mmds.connections.len() <= CONNECTIONS_MAX);
        assert!(self.mmds.resets.len() <= RESETS_MAX);
        frames
    }
}

/// One connection of a guest that follows the protocol.
pub struct Client {
    port: u16,
    seq: u32,
    expected: u32,
    pub received: Vec<u8>,
    pub closed: bool,
    pub reset: bool,
    connected: bool,
}

impl Client {
    pub fn new(port: u16, seq: u32) -> Self {
        let (received, closed, reset, connected) = <_>::default();
        Self { port, seq, expected: 0, received, closed, reset, connected }
    }

    /// Returns a frame of this connection.
    pub fn frame(&self, flags: u8, payload: &[u8], window: u16) -> Vec<u8> {
        segment(self.port, self.seq, self.expected, flags, payload, window)
    }

    /// Sends a request and waits for the whole response. `lost` decides which frames are lost, in
    /// either direction.
    pub fn ask(&mut self, bench: &mut Bench, request: &[u8], lost: &mut dyn FnMut() -> bool) {
        let mut acked = 0;
        for round in 0..400 {
            let flags = if self.connected { flag::ACK } else { flag::SYN };
            let payload = if self.connected { &request[acked..] } else { &[] };
            let frame = self.frame(flags, payload, 3000);
            if !lost() {
                bench.mmds.receive(&frame, bench.now);
            }
            for frame in bench.frames() {
                if !lost() {
                    acked += self.hear(&frame, request.len() - acked);
                }
            }
            if self.reset || self.is_answered() {
                return;
            }
            // Time passes only when nothing else happens.
            bench.now += if round % 2 == 1 { LATER } else { Duration::ZERO };
        }
        panic!("no answer: {:?}", String::from_utf8_lossy(&self.received));
    }

    /// Receives a frame. Returns how many of the client's bytes it acknowledges.
    fn hear(&mut self, frame: &[u8], outstanding: usize) -> usize {
        let Some(Frame::Tcp(segment)) = packet::parse(frame) else { return 0 };
        if segment.peer.port != PORT || segment.port != self.port {
            return 0;
        }
        self.reset |= segment.flags & flag::RST != 0;
        if segment.flags & flag::SYN != 0 && !self.connected {
            self.connected = true;
            (self.seq, self.expected) = (self.seq.wrapping_add(1), segment.seq.wrapping_add(1));
            return 0;
        }
        if !self.connected {
            return 0;
        }
        let acked = segment.ack.wrapping_sub(self.seq) as usize;
        let acked = if acked <= outstanding { acked } else { 0 };
        self.seq = self.seq.wrapping_add(acked as u32);
        if segment.seq == self.expected {
            self.received.extend(segment.payload);
            self.expected = self.expected.wrapping_add(segment.payload.len() as u32);
            if segment.flags & flag::FIN != 0 {
                self.closed = true;
                self.expected = self.expected.wrapping_add(1);
            }
        }
        acked
    }

    /// Returns whether a whole response has been received.
    fn is_answered(&self) -> bool {
        let text = String::from_utf8_lossy(&self.received);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
        let len = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
        len.is_some_and(|len| len.parse() == Ok(body.len()))
    }
}

fn segment(port: u16, seq: u32, ack: u32, flags: u8, payload: &[u8], window: u16) -> Vec<u8> {
    let service = MmdsConfig::default().ipv4;
    let peer = Peer { ip: service, port: PORT };
    let mut frame = packet::tcp(
        GUEST_IP,
        &Outgoing { peer, port, seq, ack, flags, window, payload },
        SERVICE_MAC,
    );
    frame[6..12].copy_from_slice(&GUEST_MAC);
    frame
}

/// Sends frames made of `bytes`, some of them nearly valid. Whatever they are, the service must
/// send a bounded number of well-formed frames, and then still answer a client that follows the
/// protocol.
pub fn walk(bytes: &[u8]) {
    let mut bench = Bench::new(MmdsConfig::default());
    let mut input = bytes.iter().copied();
    // The last sequence numbers of the service, so that the walk can match them.
    let (mut seq, mut ack) = (1000u32, 0u32);
    while let Some(choice) = input.next() {
        let mut byte = || input.next().unwrap_or(0);
        match choice % 8 {
            0 => {
                let len = usize::from(byte());
                let mut frame = segment(u16::from(byte()), seq, ack, byte(), &[], 100);
                frame.resize(frame.len() + len / 8, byte());
                let at = usize::from(byte()) % frame.len();
                frame[at] = byte();
                frame.truncate(len.max(ETHERNET_LEN));
                bench.mmds.receive(&frame, bench.now);
            }
            1 => bench.now += Duration::from_millis(u64::from(byte()) * 50),
            2 => {
                let frame = segment(u16::from(byte() % 40), seq, 0, flag::SYN, &[], byte().into());
                bench.mmds.receive(&frame, bench.now);
                seq = seq.wrapping_add(1);
            }
            3 => bench.mmds.reset(),
            _ => {
                let text = match byte() % 6 {
                    0 => &b"GET /id HTTP/1.1\r\n\r\n"[..],
                    1 => b"GET /long HTTP/1.1\r\nConnection: close\r\n\r\n",
                    2 => {
                        b"PUT /latest/api/token HTTP/1.1\r\nX-metadata-token-ttl-seconds: 1\r\n\r\n"
                    }
                    3 => b"GET /",
                    4 => &[b'a'; 1400],
                    _ => b"",
                };
                let (port, flags) = (u16::from(byte() % 40), byte() | flag::ACK);
                let off = u32::from(byte() % 3);
                let window = u16::from(byte()) << 8;
                let frame = segment(port, seq, ack.wrapping_add(off), flags, text, window);
                bench.mmds.receive(&frame, bench.now);
                seq = seq.wrapping_add(text.len() as u32 * u32::from(byte() & 1));
            }
        }
        bench.mmds.wakes_at();
        if choice & 0x80 == 0 {
            for frame in bench.frames() {
                if let Some(Frame::Tcp(said)) = packet::parse(&frame) {
                    ack = said.seq.wrapping_add(said.payload.len() as u32);
                    ack = ack.wrapping_add(u32::from(said.flags & flag::SYN != 0));
                    seq = said.ack;
                }
            }
        }
    }
    bench.frames();
    let mut client = Client::new(50_000, u32::MAX - 3);
    client.ask(&mut bench, b"GET /id HTTP/1.1\r\n\r\n", &mut || false);
    assert!(client.received.ends_with(b"\r\n\r\ni-1"));
}
