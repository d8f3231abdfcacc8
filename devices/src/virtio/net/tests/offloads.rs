//! The tap may use exactly the offloads that the driver accepted.

use super::super::tap::offload_for;
use super::*;

#[test]
fn header_has_twelve_bytes_whatever_was_agreed_on() {
    for features in [VERSION_1, VERSION_1 | feature::MRG_RXBUF, VERSION_1 | feature::CSUM] {
        let (net, peer) = wired();
        let mut driver = MockDriver::new(net);
        driver.start_with(features);
        // One byte less than a header is neither a frame to send nor a usable receive buffer.
        driver.request(TX, &[Readable(&NO_HEADER[1..]), Readable(&frame(60))]);
        let left = peer.receive();
        assert!(left.is_none(), "{features:#x}: the frame began a byte late");
        driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame(60))]);
        assert_eq!(peer.receive().unwrap()[HEADER_LEN..], frame(60), "{features:#x}");
        driver.send(RX, &[Writable(HEADER_LEN as u32 - 1)]);
        let buffer = driver.send(RX, &[Writable(HEADER_LEN as u32 + 60)]);
        peer.send(&frame(60));
        driver.run();
        let used: Vec<_> = std::iter::from_fn(|| driver.used(RX)).map(|used| used.len).collect();
        assert_eq!(used, [0, HEADER_LEN as u32 + 60], "{features:#x}");
        assert_eq!(driver.contents(&buffer)[0][HEADER_LEN..], frame(60), "{features:#x}");
    }
}

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
    // These frames could use offloads that the next driver did not accept.
    (0..3).for_each(|_| peer.send(&frame(99)));
    driver.start_with(VERSION_1);
    peer.send(&frame(60));
    refill(&mut driver, 4, 2048);
    driver.run();
    assert_eq!(driver.used(RX).unwrap().len, 72);
    assert_eq!(driver.used(RX), None);
}
