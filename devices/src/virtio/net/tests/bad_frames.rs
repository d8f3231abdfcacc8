//! Frames and headers that a hostile guest may offer: dropped, counted, and the next one is sent.

use super::super::sys;
use super::super::wire::{self, FRAME_MAX, Refusal, TxOffloads};
use super::*;
use crate::virtio::chain::Segment;

/// Sends one header and frame. Returns whether it reached the other end. The next valid one must.
fn passes(header: &[u8], frame_bytes: &[u8]) -> bool {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    let (used, _) = driver.request(TX, &[Readable(header), Readable(frame_bytes)]);
    assert_eq!(used.unwrap().len, 0);
    let arrived = peer.receive().is_some();
    assert_eq!(driver.transport.counters().refused, u64::from(!arrived));
    driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame(60))]);
    assert_eq!(peer.receive().unwrap()[HEADER_LEN..], frame(60));
    assert!(!driver.needs_reset());
    arrived
}

#[test]
fn d1_frame_too_short_or_too_long_is_dropped_and_counted() {
    for len in [1, 13, FRAME_MAX + 1, 100_000] {
        assert!(!passes(&NO_HEADER, &frame(len)), "{len}");
    }
    for len in [14, 60, 1514, FRAME_MAX] {
        assert!(passes(&NO_HEADER, &frame(len)), "{len}");
    }
}

#[test]
fn d3_chain_of_header_alone_is_dropped_and_counted() {
    for len in [1, 11, 12] {
        let (net, peer) = wired();
        let mut driver = MockDriver::ready(net);
        let (used, _) = driver.request(TX, &[Readable(&vec![0; len])]);
        assert_eq!(used.unwrap().len, 0);
        // A chain with only writable buffers has nothing to send.
        driver.request(TX, &[Writable(2048)]);
        assert_eq!(driver.transport.counters().refused, 2);
        assert!(peer.receive().is_none() && !driver.needs_reset());
    }
}

/// flags, gso type, header length, gso size, checksum start, checksum offset
fn header(flags: u8, gso: u8, len: u16, size: u16, start: u16, offset: u16) -> [u8; HEADER_LEN] {
    let mut header = [0; HEADER_LEN];
    header[..2].copy_from_slice(&[flags, gso]);
    for (at, field) in (2..).step_by(2).zip([len, size, start, offset]) {
        header[at..at + 2].copy_from_slice(&field.to_le_bytes());
    }
    header
}

#[test]
fn d2_bad_offsets_and_kinds_in_the_header_are_dropped_and_counted() {
    let bad = [
        header(1, 0, 0, 0, 34, u16::MAX),
        header(1, 0, 0, 0, u16::MAX, u16::MAX),
        header(1, 0, 0, 0, 99, 0),
        header(1, 0, 0, 0, 13, 6),
        header(0, 1, 54, 1448, 34, 16),
        header(1, 1, 54, 0, 34, 16),
        header(1, 1, 101, 1448, 34, 16),
        header(1, 2, 54, 1448, 34, 16),
        header(1, 3, 54, 1448, 34, 16),
        header(1, 0x7f, 54, 1448, 34, 16),
        header(1, 0x80, 54, 1448, 34, 16),
        header(1, 5, 54, 1448, 34, 16),
    ];
    for header in bad {
        assert!(!passes(&header, &frame(100)), "{header:?}");
    }
    let good = [
        header(1, 0, 0, 0, 34, 16),
        header(1, 0, 0, 0, 98, 0),
        header(1, 1, 54, 1448, 34, 16),
        header(1, 4, 74, 1428, 54, 16),
        header(1, 0x81, 54, 1448, 34, 16),
        // Values in unused fields are ignored.
        header(0, 0, 9, 9, 999, 999),
        header(0xfe, 0, 0, 0, 0, 0),
    ];
    for header in good {
        assert!(passes(&header, &frame(100)), "{header:?}");
    }
}

#[test]
fn d2_offloads_that_were_not_agreed_on_are_dropped() {
    let all = TxOffloads { csum: true, tso4: true, tso6: true, ecn: true };
    let checksum = header(1, 0, 0, 0, 34, 16);
    let segments = |gso| header(1, gso, 54, 1448, 34, 16);
    let cases = [
        (checksum, TxOffloads { csum: false, ..all }, Refusal::Checksum),
        (segments(1), TxOffloads { tso4: false, ..all }, Refusal::Segmentation),
        (segments(4), TxOffloads { tso6: false, ..all }, Refusal::Segmentation),
        (segments(0x81), TxOffloads { ecn: false, ..all }, Refusal::Segmentation),
    ];
    for (header, offloads, refusal) in cases {
        assert_eq!(wire::check_header(&header, 1514, offloads), Err(refusal));
        let clean = wire::check_header(&header, 1514, all).unwrap();
        assert_eq!(clean[..10], header[..10]);
    }
}

#[test]
fn d6_frame_of_another_source_or_with_a_tag_is_dropped_and_counted() {
    let mut spoofed = frame(60);
    spoofed[11] ^= 1;
    assert!(!passes(&NO_HEADER, &spoofed));
    for tag in [[0x81, 0x00], [0x88, 0xa8], [0x91, 0x00]] {
        let mut tagged = frame(60);
        tagged[12..14].copy_from_slice(&tag);
        assert!(!passes(&NO_HEADER, &tagged), "{tag:x?}");
    }
}

#[test]
fn a11_source_flipped_by_another_thread_never_gets_out() {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    let offered = driver.place(TX, &[Readable(&NO_HEADER), Readable(&frame(60))]);
    let (memory, at) = (driver.memory.clone(), offered.buffers[1].0);
    let racer = super::super::super::testing::Racer::spawn(move || {
        use vm_memory::{Bytes, GuestAddress};
        memory.write_slice(&[9; 6], GuestAddress(at.0 + 6)).unwrap();
        memory.write_slice(&MAC.0, GuestAddress(at.0 + 6)).unwrap();
    });
    let mut arrived = 0;
    for _ in 0..10_000 {
        driver.offer(TX, offered.head);
        driver.kick(TX);
        driver.run();
        while let Some(frame) = peer.receive() {
            assert_eq!(frame[HEADER_LEN + 6..HEADER_LEN + 12], MAC.0);
            arrived += 1;
        }
    }
    drop(racer);
    assert!(arrived > 0);
}

#[test]
fn d4_buffer_too_small_for_a_header_is_refused_and_the_next_is_filled() {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    refill(&mut driver, 3, 11);
    refill(&mut driver, 1, 2048);
    peer.send(&frame(60));
    driver.run();
    let lens: Vec<_> = std::iter::from_fn(|| driver.used(RX)).map(|used| used.len).collect();
    assert_eq!(lens, [0, 0, 0, 72]);
    assert_eq!(driver.transport.counters().refused, 3);
}

#[test]
fn d4_frame_too_long_for_one_buffer_is_dropped_where_buffers_are_not_merged() {
    let (net, peer) = wired();
    let mut driver = MockDriver::new(net);
    driver.start_with(VERSION_1);
    let buffers = refill(&mut driver, 2, 500);
    peer.send(&frame(1400));
    peer.send(&frame(60));
    driver.run();
    assert_eq!(driver.used(RX).unwrap().len, 72);
    assert_eq!(driver.contents(&buffers[0])[0][10..HEADER_LEN], 1u16.to_le_bytes());
    assert_eq!((driver.used(RX), driver.transport.counters().refused), (None, 1));
}

#[test]
fn d4_ring_full_of_crumbs_never_stalls_or_spins() {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    // A frame that half a ring of small buffers cannot hold is dropped, not waited for.
    refill(&mut driver, 200, 20);
    peer.send(&frame(60_000));
    peer.send(&frame(14));
    driver.run();
    let lens: Vec<_> = std::iter::from_fn(|| driver.used(RX)).map(|used| used.len).collect();
    assert_eq!(lens, [20, 6]);
    // A frame that waits, and after its buffers one that cannot be used.
    driver.start();
    refill(&mut driver, 2, 500);
    driver.send(RX, &[Writable(5)]);
    peer.send(&frame(2000));
    driver.run();
    refill(&mut driver, 4, 2048);
    peer.send(&frame(60));
    driver.run();
    let lens: Vec<_> = std::iter::from_fn(|| driver.used(RX)).map(|used| used.len).collect();
    assert_eq!(lens.first(), Some(&72));
}

#[test]
fn d12_dead_peer_costs_frames_and_nothing_else() {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    drop(peer);
    refill(&mut driver, 4, 2048);
    for _ in 0..100 {
        let (used, _) = driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame(60))]);
        assert!(used.is_some());
    }
    assert!(driver.devices.run(50) < 50, "spins on a dead tap");
    assert!(!driver.needs_reset());
    assert_eq!(driver.transport.counters().refused, 0);
}

/// A tap that accepts frames and fails every read.
struct Mute(std::io::PipeWriter);

impl super::super::tap::Link for Mute {
    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.0)
    }
    fn set_offload(&mut self, _offload: u32) -> std::io::Result<()> {
        Ok(())
    }
    fn has_offloads(&self) -> bool {
        true
    }
    fn send(
        &self,
        first: &[u8],
        memory: &crate::GuestMemory,
        rest: &[Segment],
    ) -> std::io::Result<usize> {
        sys::write_frame(self.fd(), first, memory, rest)
    }
    fn name(&self) -> &str {
        "mute"
    }
}

#[test]
fn d12_tap_whose_reads_fail_costs_what_it_had_and_the_card_sends_on() {
    let (mut sent, tap) = std::io::pipe().unwrap();
    let mut driver = MockDriver::ready(Net { link: Box::new(Mute(tap)), ..wired().0 });
    refill(&mut driver, 4, 2048);
    assert!(driver.devices.run(50) < 50, "spins on a tap that fails");
    assert!(!driver.needs_reset());
    driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame(60))]);
    let mut bytes = [0; HEADER_LEN + 60];
    std::io::Read::read_exact(&mut sent, &mut bytes).unwrap();
    assert_eq!(bytes[HEADER_LEN..], frame(60));
}
