//! What the tap may leave undone is exactly what the driver agreed to.

use super::super::tap::offload_for;
use super::*;

#[test]
fn offload_follows_the_agreed_features_on_each_activation() {
    let (net, peer) = wired();
    let mut driver = MockDriver::new(net);
    let all = driver.offered();
    let cases = [
        (all, 0x0f),
        (VERSION_1, 0),
        (VERSION_1 | feature::GUEST_CSUM, 0x01),
        (VERSION_1 | feature::GUEST_CSUM | feature::GUEST_TSO6, 0x05),
    ];
    for (features, offload) in cases {
        driver.start_with(features);
        assert_eq!(peer.offload(), offload, "{features:#x}");
    }
}

#[test]
fn offload_without_checksums_is_none_at_all() {
    assert_eq!(offload_for(feature::GUEST_TSO4 | feature::GUEST_TSO6 | feature::GUEST_ECN), 0);
    assert_eq!(offload_for(feature::GUEST_CSUM | feature::GUEST_ECN), 1);
}

#[test]
fn frames_for_an_earlier_driver_are_not_given_to_the_next() {
    let (net, peer) = wired();
    let mut driver = MockDriver::ready(net);
    driver.run();
    // It could have work left undone that the next driver never agreed to.
    (0..3).for_each(|_| peer.send(&frame(99)));
    driver.start_with(VERSION_1);
    peer.send(&frame(60));
    refill(&mut driver, 4, 2048);
    driver.run();
    assert_eq!(driver.used(RX).unwrap().len, 72);
    assert_eq!(driver.used(RX), None);
}
