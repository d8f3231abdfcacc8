//! Sequences on both queues of a network card, with a host that sends too, against a list of
//! frames.
//!
//! What leaves the card must be what the guest sent, in order, and every plain frame must leave.
//! What the guest receives must be what the host sent, in order; frames may be lost, never changed.
//! A buffer comes back once, and only if it was offered.

use std::collections::{HashMap, VecDeque};

use pvmm_devices::virtio::net::testing::{MAC, NO_HEADER, Peer, RX, TX, wired};
use pvmm_devices::virtio::net::wire::{ETHERNET_LEN, FRAME_MAX, HEADER_LEN};
use pvmm_devices::virtio::testing::Buffer::{self, Readable, Writable};
use pvmm_devices::virtio::testing::{MockDriver, Offered};

use crate::input::Input;

const CSUM: u8 = 1;
const MRG_RXBUF: u64 = 1 << 15;
/// Fewer than a ring has room for, each of at most this many pieces.
const OUT_MAX: usize = 60;
const PIECES_MAX: u8 = 4;

struct Card {
    driver: MockDriver,
    peer: Peer,
    features: u64,
    /// Receive buffers that the device has, by their heads.
    out: HashMap<u32, Offered>,
    /// The frames that the host sent and the guest may still receive.
    coming: VecDeque<Vec<u8>>,
    serial: u8,
}

pub fn frames(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (net, peer) = wired();
    let mut driver = MockDriver::new(net);
    let features = chosen_features(&mut input, driver.offered());
    driver.start_with(features);
    let (out, coming) = (HashMap::new(), VecDeque::new());
    let mut card = Card { driver, peer, features, out, coming, serial: 0 };
    let mut steps = 0;
    while !input.is_empty() && steps < 80 {
        steps += 1;
        match input.below(10) {
            0..=2 => card.guest_sends(&mut input),
            3..=5 => card.guest_offers(&mut input),
            6..=7 => card.host_sends(&mut input),
            8 => card.starts_over(&mut input),
            _ => card = card.moves(),
        }
        card.receives();
    }
    card.works();
}

/// Everything on offer but for some bits, some of the time.
fn chosen_features(input: &mut Input, offered: u64) -> u64 {
    match input.below(4) {
        0 => offered & !MRG_RXBUF,
        // Only what is below the transport's own bits.
        1 => offered & !(input.u64() & 0xff_ffff),
        _ => offered,
    }
}

impl Card {
    fn guest_sends(&mut self, input: &mut Input) {
        let mut header = NO_HEADER;
        let mut frame = vec![0xff; 6];
        frame.extend(MAC.0);
        frame.extend([8, 0]);
        let len = match input.below(8) {
            0 => input.number() as usize % (FRAME_MAX + 40),
            1 => usize::from(input.below(40)),
            _ => ETHERNET_LEN + usize::from(input.u16() % 1500),
        };
        self.serial = self.serial.wrapping_add(1);
        frame.extend(std::iter::repeat_n(self.serial, len.saturating_sub(ETHERNET_LEN)));
        frame.truncate(len);
        let mut plain = (ETHERNET_LEN..=FRAME_MAX).contains(&len);
        match input.below(4) {
            0 => {
                header = input.bytes();
                // Whatever a header says that is not zero may be a reason to refuse.
                plain &= header[..10] == NO_HEADER[..10];
            }
            1 if len >= ETHERNET_LEN => {
                let at = 6 + usize::from(input.below(8));
                frame[at] = input.u8();
                let tagged = [[0x81, 0x00], [0x88, 0xa8], [0x91, 0x00]];
                plain &= frame[6..12] == MAC.0 && !tagged.iter().any(|tag| frame[12..14] == *tag);
            }
            _ => {}
        }
        let whole = [&header[..], &frame].concat();
        let piece = whole.len().div_ceil(1 + usize::from(input.below(PIECES_MAX))).max(1);
        let pieces: Vec<Buffer> = whole.chunks(piece).map(Readable).collect();
        let (used, _) = self.driver.request(TX, &pieces);
        assert_eq!(used.expect("a frame that is not served").len, 0);
        assert!(!self.driver.needs_reset());
        let left = self.peer.receive();
        assert!(!plain || left.is_some(), "a plain frame of {len} bytes did not leave");
        let Some(left) = left else { return };
        assert!(left[HEADER_LEN..] == frame, "another frame left than was sent");
        assert_eq!(frame[6..12], MAC.0, "a frame left under another address");
        if left[0] & CSUM != 0 {
            assert_ne!(self.features & 1, 0, "a checksum was left to a host that did not agree");
            let at = |i| usize::from(u16::from_le_bytes([left[i], left[i + 1]]));
            assert!(at(6) + at(8) + 2 <= frame.len(), "a checksum beyond its frame");
        }
        assert!(self.peer.receive().is_none(), "two frames left for one");
    }

    fn guest_offers(&mut self, input: &mut Input) {
        for _ in 0..1 + input.below(6) {
            if self.out.len() >= OUT_MAX {
                return;
            }
            let mut pieces = Vec::new();
            for _ in 0..1 + input.below(PIECES_MAX) {
                let len = if input.u8() < 200 { input.u8().into() } else { input.u16() / 4 };
                pieces.push(Writable(len.into()));
            }
            let offered = self.driver.send(RX, &pieces);
            let known = self.out.insert(offered.head.into(), offered);
            assert!(known.is_none(), "the driver gave one descriptor out twice");
        }
        self.driver.run();
    }

    fn host_sends(&mut self, input: &mut Input) {
        for _ in 0..1 + input.below(4) {
            let len = match input.below(4) {
                0 => usize::from(input.u8()),
                1 => usize::from(input.u16()),
                _ => ETHERNET_LEN + usize::from(input.u8()) * 6,
            };
            self.serial = self.serial.wrapping_add(1);
            let frame = vec![self.serial; len];
            if self.peer.offer(&frame) {
                self.coming.push_back(frame);
            }
        }
        self.driver.run();
    }

    /// The driver resets the device and sets it up anew, perhaps with other features.
    fn starts_over(&mut self, input: &mut Input) {
        self.features = chosen_features(input, self.driver.offered());
        self.driver.start_with(self.features);
        self.driver.run();
        self.out.clear();
        // What came for the old driver is not for the new one.
        self.coming.clear();
    }

    /// A snapshot, restored on another wire.
    fn moves(self) -> Self {
        let (net, peer) = wired();
        let driver = self.driver.suspend().resume(net).expect("what was saved can be restored");
        driver.run();
        Self { driver, peer, coming: VecDeque::new(), ..self }
    }

    /// Takes what the device used, and looks for each frame among those that the host sent.
    fn receives(&mut self) {
        while let Some(first) = self.driver.used(RX) {
            let (mut bytes, room) = self.take(first.head, first.len);
            if first.len == 0 {
                // A buffer that cannot even hold a header, or is in too many pieces.
                assert!(room < HEADER_LEN as u64, "a good buffer came back empty");
                continue;
            }
            let count = u16::from_le_bytes([bytes[10], bytes[11]]);
            assert!(count >= 1 && (count == 1 || self.features & MRG_RXBUF != 0));
            for _ in 1..count {
                let more = self.driver.used(RX).expect("fewer buffers than were promised");
                bytes.extend(self.take(more.head, more.len).0);
            }
            let frame = &bytes[HEADER_LEN..];
            let found = self.coming.iter().position(|sent| sent == frame);
            let found = found.expect("the guest received what nobody sent, or out of order");
            self.coming.drain(..=found);
        }
        assert!(!self.driver.needs_reset());
    }

    /// The bytes of a buffer that came back, and how much room it had.
    fn take(&mut self, head: u32, len: u32) -> (Vec<u8>, u64) {
        let offered = self.out.remove(&head).expect("a buffer that the device does not have");
        let room = offered.buffers.iter().map(|(_, len)| u64::from(*len)).sum();
        let mut bytes = self.driver.contents(&offered).concat();
        assert!(len as usize <= bytes.len(), "more bytes than there was room for");
        bytes.truncate(len as usize);
        (bytes, room)
    }

    /// With room for the longest frame, one more of them must arrive.
    fn works(mut self) {
        self.starts_over(&mut Input::new(&[2]));
        for _ in 0..40 {
            let offered = self.driver.send(RX, &[Writable(2048)]);
            self.out.insert(offered.head.into(), offered);
        }
        let frame = vec![7; 60_000];
        assert!(self.peer.offer(&frame));
        self.coming.push_back(frame);
        self.driver.run();
        self.receives();
        assert!(self.coming.is_empty(), "a frame with room did not arrive");
    }
}
