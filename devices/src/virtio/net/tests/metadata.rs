//! The metadata service through the queues of a card: its frames never reach the tap, all others
//! do.

use std::sync::Arc;

use super::super::mmds::testing::{Client, GUEST_MAC};
use super::super::mmds::{Mmds, MmdsConfig};
use super::*;

const SYN: u8 = 0x02;

fn card() -> (Net, Peer) {
    let (mut net, peer) = wired();
    assert_eq!(MAC.0, GUEST_MAC);
    let mut mmds = Mmds::new(MmdsConfig::default(), MAC.0);
    mmds.set_content(Arc::new(serde_json::json!({ "id": "i-1" })));
    net.mmds = Some(mmds);
    (net, peer)
}

fn offer(driver: &mut MockDriver, frame: &[u8]) {
    let (used, _) = driver.request(TX, &[Readable(&NO_HEADER), Readable(frame)]);
    assert_eq!(used.unwrap().len, 0);
}

#[test]
fn frame_for_the_service_is_answered_and_others_go_to_the_tap() {
    let (net, peer) = card();
    let mut driver = MockDriver::ready(net);
    let buffer = driver.send(RX, &[Writable(2048)]);
    offer(&mut driver, &Client::new(4000, 1).frame(SYN, &[], 1000));
    offer(&mut driver, &frame(60));
    assert_eq!(peer.receive().unwrap()[HEADER_LEN..], frame(60));
    assert!(peer.receive().is_none());
    // A SYN-ACK with the MSS option.
    assert_eq!(driver.used(RX).unwrap().len as usize, HEADER_LEN + 58);
    let bytes = driver.contents(&buffer).concat();
    assert_eq!(bytes[..HEADER_LEN], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(bytes[HEADER_LEN + 47], 0x12);
}

#[test]
fn answer_waits_for_buffers_and_for_enough_of_them() {
    for room in [2048, 100] {
        let (net, peer) = card();
        let mut driver = MockDriver::ready(net);
        offer(&mut driver, &Client::new(4000, 1).frame(SYN, &[], 1000));
        assert!(driver.devices.run(50) < 50, "spins without buffers");
        assert_eq!(driver.used(RX), None);
        // Many small buffers are as good as one.
        refill(&mut driver, 2048 / room as usize, room);
        driver.run();
        assert_eq!(driver.used(RX).unwrap().len as usize, HEADER_LEN + 58);
        // Frames of the tap follow.
        refill(&mut driver, 1, 2048);
        peer.send(&frame(60));
        driver.run();
        assert_eq!(driver.used(RX).unwrap().len, 72);
    }
}

#[test]
fn answer_too_long_for_unmerged_buffers_is_dropped_and_the_card_goes_on() {
    let (net, peer) = card();
    let mut driver = MockDriver::ready(net);
    driver.start_with(VERSION_1);
    refill(&mut driver, 2, 64);
    offer(&mut driver, &Client::new(4000, 1).frame(SYN, &[], 1000));
    assert!(driver.devices.run(50) < 50, "spins with small buffers");
    assert_eq!(driver.transport.counters().refused, 1);
    peer.send(&frame(40));
    driver.run();
    assert_eq!(driver.used(RX).unwrap().len, 52);
}

#[test]
fn frame_for_the_service_that_means_nothing_is_counted_and_goes_nowhere() {
    let (net, peer) = card();
    let mut driver = MockDriver::ready(net);
    let mut datagram = Client::new(4000, 1).frame(SYN, &[], 1000);
    datagram[23] = 17;
    offer(&mut driver, &datagram);
    let mut long = Client::new(4000, 1).frame(SYN, &[], 1000);
    long.resize(30_000, 0);
    offer(&mut driver, &long);
    assert_eq!(driver.transport.counters().refused, 2);
    assert!(peer.receive().is_none());
    assert!(!driver.needs_reset());
}

#[test]
fn service_is_saved_without_its_content() {
    let (net, _peer) = card();
    let DeviceState::Net(state) = super::super::super::VirtioDevice::save(&net) else { panic!() };
    assert_eq!(state.mmds, Some(MmdsConfig::default()));
}
