//! The network card, driven by a mock driver, with a socket in place of the tap.

mod bad_frames;
mod metadata;
mod offloads;
mod sockets;
mod taps;

use super::super::conformance::{self, Specimen};
use super::super::mmio::VERSION_1;
use super::super::registry::DeviceState;
use super::super::testing::Buffer::{Readable, Writable};
use super::super::testing::{MockDriver, WRITE};
use super::config::{Mac, NetConfig, TapSource};
use super::device::{Net, feature};
use super::state::NetStateV1;
use super::testing::{MAC, NO_HEADER, Peer, RX, TX, limited, wired};
use super::wire::{ETHERNET_LEN, HEADER_LEN, NUM_BUFFERS_OFFSET};
use crate::rate_limiter::{BucketConfig, RateLimiterConfig};

/// Returns a frame of `len` bytes from the guest's own address.
fn frame(len: usize) -> Vec<u8> {
    let mut frame = vec![0xff; 6];
    frame.extend(MAC.0);
    frame.extend([8, 0]);
    frame.extend((ETHERNET_LEN..len).map(|at| at as u8));
    frame.truncate(len);
    frame
}

/// Offers receive buffers of `len` bytes each.
fn refill(driver: &mut MockDriver, count: usize, len: u32) -> Vec<super::super::testing::Offered> {
    (0..count).map(|_| driver.send(RX, &[Writable(len)])).collect()
}

/// A card on one end of a wire, whose other end the test keeps.
struct OnWire(std::cell::RefCell<Option<Peer>>);

impl OnWire {
    fn card(&self) -> Net {
        let (net, peer) = wired();
        *self.0.borrow_mut() = Some(peer);
        net
    }
}

impl Specimen for OnWire {
    type Device = Net;
    const QUEUE: usize = TX;

    fn fresh(&self) -> Net {
        self.card()
    }

    fn restored(&self, state: &DeviceState) -> Net {
        assert_eq!(*state, DeviceState::Net(NetStateV1 { mac: MAC, mtu: None, mmds: None }));
        self.card()
    }

    fn exercise(&self, driver: &mut MockDriver) {
        let peer = self.0.borrow();
        let peer = peer.as_ref().unwrap();
        let (used, _) = driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame(60))]);
        assert!(used.is_some());
        assert_eq!(peer.receive().unwrap()[HEADER_LEN..], frame(60));
        peer.send(&frame(99));
        let buffer = driver.send(RX, &[Writable(2048)]);
        driver.run();
        assert_eq!(driver.used(RX).unwrap().len as usize, HEADER_LEN + 99);
        assert_eq!(driver.contents(&buffer)[0][HEADER_LEN..HEADER_LEN + 99], frame(99));
    }
}

conformance::suite!(OnWire(Default::default()));

/// The conformance suite for the receive queue.
mod receiving {
    use super::*;

    struct Receiving(OnWire);

    impl Specimen for Receiving {
        type Device = Net;
        const QUEUE: usize = RX;

        fn fresh(&self) -> Net {
            self.0.fresh()
        }

        fn restored(&self, state: &DeviceState) -> Net {
            self.0.restored(state)
        }

        fn exercise(&self, driver: &mut MockDriver) {
            self.0.exercise(driver);
        }
    }

    conformance::suite!(Receiving(OnWire(Default::default())));
}

#[test]
fn frame_of_the_guest_arrives_whole_however_it_is_cut() {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    let bytes = [&NO_HEADER[..], &frame(1514)].concat();
    for cut in [1, 5, 12, 13, 20, 26, 27, 700] {
        let (first, rest) = bytes.split_at(cut);
        let (used, _) = driver.request(TX, &[Readable(first), Readable(rest)]);
        assert_eq!(used.unwrap().len, 0);
        assert_eq!(peer.receive().unwrap(), bytes, "cut at {cut}");
    }
    assert_eq!(driver.transport.counters().refused, 0);
}

#[test]
fn frame_for_the_guest_is_spread_over_merged_buffers() {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    let buffers = refill(&mut driver, 4, 500);
    peer.send(&frame(1400));
    driver.run();
    let lens: Vec<_> = std::iter::from_fn(|| driver.used(RX)).map(|used| used.len).collect();
    assert_eq!(lens, [500, 500, 412]);
    let bytes: Vec<u8> = buffers.iter().flat_map(|b| driver.contents(b).concat()).collect();
    assert_eq!(bytes[10..HEADER_LEN], 3u16.to_le_bytes());
    assert_eq!(bytes[HEADER_LEN..HEADER_LEN + 1400], frame(1400));
    // The buffer that was not needed is still with the device, and is used next.
    peer.send(&frame(60));
    driver.run();
    assert_eq!(driver.used(RX).unwrap().len, 72);
    assert_eq!(driver.contents(&buffers[3])[0][10..HEADER_LEN], 1u16.to_le_bytes());
}

#[test]
fn frame_longer_than_the_buffers_waits_for_more() {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    let mut buffers = refill(&mut driver, 2, 500);
    peer.send(&frame(2000));
    driver.run();
    assert_eq!(driver.used(RX), None);
    buffers.extend(refill(&mut driver, 1, 500));
    driver.run();
    assert_eq!(driver.used(RX), None);
    buffers.extend(refill(&mut driver, 2, 800));
    driver.run();
    let lens: Vec<_> = std::iter::from_fn(|| driver.used(RX)).map(|used| used.len).collect();
    assert_eq!(lens, [500, 500, 500, 512]);
    let bytes: Vec<u8> = buffers.iter().flat_map(|b| driver.contents(b).concat()).collect();
    assert_eq!(bytes[HEADER_LEN..HEADER_LEN + 2000], frame(2000));
}

#[test]
fn frame_that_waits_is_dropped_by_a_snapshot_and_its_buffers_are_not() {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    refill(&mut driver, 2, 500);
    peer.send(&frame(2000));
    driver.run();
    // Saving fails for a device that holds chains.
    let suspended = driver.suspend();
    let (net, peer) = wired();
    let mut driver = suspended.resume(net).unwrap();
    peer.send(&frame(60));
    driver.run();
    assert_eq!(driver.used(RX).unwrap().len, 72);
}

#[test]
fn chain_that_was_returned_among_those_given_back_is_no_obstacle_to_a_snapshot() {
    let (net, _peer) = wired();
    let mut driver = MockDriver::ready(net);
    // The first waits for a frame, the second is in the wrong order and is returned at once.
    driver.send(RX, &[Writable(100)]);
    driver.send(RX, &[Writable(100), Readable(&[0; 4])]);
    driver.run();
    assert_eq!(driver.used_index(RX), 1);
    let mut driver = driver.suspend().resume(wired().0).unwrap();
    assert!(driver.needs_reset());
    driver.start();
    assert_eq!(driver.status(), 0xf);
}

#[test]
fn header_is_complete_before_its_buffer_is_given_back() {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    // The count of buffers is at the address of the used ring's index, so the last write wins.
    let at = driver.used_ring(RX).0 + 2 - NUM_BUFFERS_OFFSET;
    for number in 1..=3 {
        driver.descriptor(RX, number, at, 72, WRITE, 0);
        driver.offer(RX, number);
        driver.kick(RX);
        peer.send(&frame(60));
        driver.run();
        assert_eq!(driver.used_index(RX), number);
    }
}

#[test]
fn frame_that_came_before_the_driver_is_not_handed_to_it() {
    let (net, peer) = wired();
    (0..3).for_each(|_| peer.send(&frame(1400)));
    let mut driver = MockDriver::ready(net);
    refill(&mut driver, 4, 1600);
    peer.send(&frame(60));
    driver.kick(RX);
    driver.run();
    assert_eq!((driver.used_index(RX), driver.used(RX).unwrap().len), (1, 72));
}

#[test]
fn d5_flood_without_buffers_stops_reading_and_goes_on_after_a_refill() {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    while peer.socket.send(&[&NO_HEADER[..], &frame(60)].concat()).is_ok() {}
    for event_idx in [true, false] {
        if !event_idx {
            driver.start_with(VERSION_1);
        }
        while peer.socket.send(&[&NO_HEADER[..], &frame(60)].concat()).is_ok() {}
        for _ in 0..300 {
            assert!(driver.devices.run(50) < 50, "spins without buffers");
            assert!(!event_idx || driver.is_kick_wanted(RX), "would not hear of the refill");
            refill(&mut driver, 1, 2048);
            driver.run();
            assert_eq!(driver.used(RX).unwrap().len, 72);
            peer.send(&frame(60));
        }
    }
}

#[test]
fn limit_holds_frames_back_in_the_ring_and_lets_them_go_in_time() {
    let ops = Some(BucketConfig { size: 2, one_time_burst: 0, refill_time_ms: 100 });
    let limit = RateLimiterConfig { bytes: None, ops };
    let (net, peer) = limited(limit, limit);
    let mut driver = MockDriver::ready(net);
    for _ in 0..4 {
        driver.send(TX, &[Readable(&NO_HEADER), Readable(&frame(60))]);
        peer.send(&frame(60));
    }
    refill(&mut driver, 8, 2048);
    driver.run();
    let sent = std::iter::from_fn(|| peer.receive()).count();
    let received = std::iter::from_fn(|| driver.used(RX)).count();
    assert!(sent <= 3 && received <= 3, "{sent} {received}");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    let (mut sent, mut received) = (sent, received);
    while (sent, received) != (4, 4) {
        assert!(std::time::Instant::now() < deadline, "{sent} {received}");
        driver.run();
        sent += std::iter::from_fn(|| peer.receive()).count();
        received += std::iter::from_fn(|| driver.used(RX)).count();
    }
}

#[test]
fn config_space_shows_mac_and_mtu() {
    let (mut net, _peer) = wired();
    let fields = feature::MAC | feature::MTU;
    assert_eq!(super::super::VirtioDevice::features(&net) & fields, feature::MAC);
    net.mtu = Some(9000);
    assert_eq!(super::super::VirtioDevice::features(&net) & fields, fields);
    let driver = MockDriver::new(net);
    assert_eq!(driver.read(0x100).to_le_bytes(), [2, 0, 0, 0]);
    assert_eq!(driver.read(0x104), 0x0000_0900);
    assert_eq!(driver.read(0x108) >> 16, 9000);
}
