//! A card on a packet socket: plain frames, no offloads, and a peer that may be slow or gone.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;

use super::super::super::VirtioDevice;
use super::super::super::mmio::RestoreError;
use super::super::SOCKET_NAME;
use super::super::config::NetError;
use super::super::tap::TapError;
use super::super::testing::packet_sockets;
use super::*;

/// Creates a card on a socket, and the peer's end as a file.
fn card() -> (Net, File) {
    let (near, far) = packet_sockets();
    let config = NetConfig { mac: Some(MAC), ..NetConfig::new(TapSource::Socket(near)) };
    (Net::new(config).unwrap(), File::from(far))
}

/// Restores a saved card on a new socket.
fn restored() -> (Net, File) {
    let (near, far) = packet_sockets();
    let state = NetStateV1 { mac: MAC, mtu: None, mmds: None };
    (Net::restore(NetConfig::new(TapSource::Socket(near)), &state).unwrap(), File::from(far))
}

fn receive(peer: &mut File) -> Option<Vec<u8>> {
    let mut bytes = vec![0; 70_000];
    let len = peer.read(&mut bytes).ok()?;
    bytes.truncate(len);
    Some(bytes)
}

fn message(len: usize) -> Vec<u8> {
    [&NO_HEADER[..], &frame(len)].concat()
}

#[test]
fn card_on_a_socket_offers_no_offloads() {
    let (net, _peer) = card();
    assert_eq!(net.features() & feature::OFFLOADS, 0);
    assert_eq!(net.features(), feature::MAC | feature::MRG_RXBUF);
    assert_eq!(net.link.name(), SOCKET_NAME);
    let (on_a_tap, _wire) = wired();
    assert_eq!(on_a_tap.features() & feature::OFFLOADS, feature::OFFLOADS);
}

#[test]
fn frames_cross_a_socket_in_both_directions() {
    let (net, mut peer) = card();
    let mut driver = MockDriver::ready(net);
    driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame(1514))]);
    assert_eq!(receive(&mut peer).unwrap(), message(1514));
    peer.write_all(&message(99)).unwrap();
    let buffer = driver.send(RX, &[Writable(2048)]);
    driver.run();
    assert_eq!(driver.used(RX).unwrap().len as usize, HEADER_LEN + 99);
    assert_eq!(driver.contents(&buffer)[0][HEADER_LEN..HEADER_LEN + 99], frame(99));
}

#[test]
fn frame_that_asks_for_an_offload_is_refused_on_a_socket() {
    let (net, mut peer) = card();
    let mut driver = MockDriver::ready(net);
    let mut header = NO_HEADER;
    (header[0], header[6], header[8]) = (1, 34, 16);
    driver.request(TX, &[Readable(&header), Readable(&frame(100))]);
    assert_eq!(receive(&mut peer), None);
    assert_eq!(driver.transport.counters().refused, 1);
}

#[test]
fn message_that_is_too_long_or_too_short_is_dropped() {
    let (net, mut peer) = card();
    let mut driver = MockDriver::ready(net);
    refill(&mut driver, 8, 4096);
    for len in [HEADER_LEN + 13, HEADER_LEN + 1515, 60_000] {
        peer.write_all(&vec![0; len]).unwrap();
    }
    peer.write_all(&message(1514)).unwrap();
    driver.run();
    assert_eq!(driver.used(RX).unwrap().len as usize, HEADER_LEN + 1514);
    assert_eq!(driver.used(RX), None);
}

#[test]
fn peer_that_does_not_read_costs_frames_and_nothing_else() {
    let (net, mut peer) = card();
    let mut driver = MockDriver::ready(net);
    for _ in 0..2000 {
        let (used, _) = driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame(1514))]);
        assert!(used.is_some(), "a frame is held");
    }
    while receive(&mut peer).is_some() {}
    driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame(60))]);
    assert_eq!(receive(&mut peer).unwrap(), message(60));
}

#[test]
fn d12_peer_that_is_gone_neither_ends_nor_spins_the_machine() {
    let (net, peer) = card();
    let mut driver = MockDriver::ready(net);
    refill(&mut driver, 4, 2048);
    drop(peer);
    assert!(driver.devices.run(50) < 50, "spins on a closed socket");
    for _ in 0..10 {
        let (used, _) = driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame(60))]);
        assert!(used.is_some());
    }
    assert!(driver.devices.run(50) < 50, "spins after a failed send");
    assert_eq!(driver.used(RX), None);
    assert_eq!(driver.transport.counters().refused, 0);
}

#[test]
fn snapshot_of_a_card_on_a_socket_continues_on_another() {
    let (net, _peer) = card();
    let driver = MockDriver::ready(net);
    driver.run();
    let (net, mut peer) = restored();
    let mut driver = driver.suspend().resume(net).unwrap();
    driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame(60))]);
    assert_eq!(receive(&mut peer).unwrap(), message(60));
}

#[test]
fn snapshot_with_offloads_is_refused_on_a_socket() {
    let (net, _wire) = wired();
    let driver = MockDriver::ready(net);
    driver.run();
    let refused = driver.suspend().resume(restored().0).err().unwrap();
    assert!(matches!(refused, RestoreError::Offloads), "{refused}");
    assert!(refused.to_string().contains("restore it on a tap"));
}

#[test]
fn snapshot_without_offloads_continues_on_a_socket() {
    let (net, _wire) = wired();
    let mut driver = MockDriver::new(net);
    driver.start_with(VERSION_1 | feature::MRG_RXBUF);
    let (net, mut peer) = restored();
    let mut driver = driver.suspend().resume(net).unwrap();
    driver.request(TX, &[Readable(&NO_HEADER), Readable(&frame(60))]);
    assert_eq!(receive(&mut peer).unwrap(), message(60));
}

#[test]
fn descriptor_that_is_no_packet_socket_is_refused() {
    let stream: OwnedFd = std::os::unix::net::UnixStream::pair().unwrap().0.into();
    let datagram: OwnedFd = std::os::unix::net::UnixDatagram::pair().unwrap().0.into();
    let file: OwnedFd = File::open("/dev/null").unwrap().into();
    for fd in [stream, datagram, file] {
        let refused = Net::new(NetConfig::new(TapSource::Socket(fd))).err().unwrap();
        assert!(matches!(refused, NetError::Tap { source: TapError::NotPackets, .. }), "{refused}");
    }
}
