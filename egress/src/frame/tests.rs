//! Frames of a hostile guest, and what the gateway makes of them.

use super::*;
use crate::reply;

const GUEST: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 9]);
const GATEWAY: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 1]);
const GUEST_IP: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY_IP: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 1);
const ENDS: Ends = Ends {
    guest_mac: Some(GUEST),
    guest_ip: GUEST_IP,
    gateway_mac: GATEWAY,
    gateway_ip: GATEWAY_IP,
};
// The guest's view, so that `reply` writes packets of the guest.
const MIRRORED: Ends = Ends {
    guest_mac: Some(GATEWAY),
    guest_ip: GATEWAY_IP,
    gateway_mac: GUEST,
    gateway_ip: GUEST_IP,
};

fn ethernet(kind: u16, payload: &[u8]) -> Vec<u8> {
    [&GATEWAY.0[..], &GUEST.0, &kind.to_be_bytes(), payload].concat()
}

fn ip(packet: &[u8]) -> Vec<u8> {
    ethernet(0x0800, packet)
}

fn dropped(bytes: &[u8]) -> Option<Drop> {
    match read(bytes, &ENDS) {
        Frame::Dropped(why) => Some(why),
        _ => None,
    }
}

/// Returns a DNS datagram of the guest: source port 5300, destination port 53.
fn dns() -> Vec<u8> {
    let mut packet = reply::dns(&MIRRORED, 53, b"question");
    // The reply has the ports the other way round; without a checksum they may be changed.
    packet[20..22].copy_from_slice(&5300u16.to_be_bytes());
    packet[26..28].copy_from_slice(&[0, 0]);
    packet
}

/// Sets the checksum of an IP header, also of one whose length is wrong.
fn sum(packet: &mut [u8]) {
    let len = (usize::from(packet[0] & 0xf) * 4).clamp(20, packet.len());
    packet[10..12].fill(0);
    let sum = !smoltcp::wire::checksum::data(&packet[..len]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
}

#[test]
fn dns_to_the_gateway_is_read() {
    let bytes = ip(&dns());
    assert_eq!(read(&bytes, &ENDS), Frame::Dns { source_port: 5300, message: b"question" });
}

#[test]
fn datagram_to_elsewhere_shows_its_ends_and_can_be_refused() {
    let mut packet = dns();
    packet[22..24].copy_from_slice(&443u16.to_be_bytes());
    packet[16..20].copy_from_slice(&[1, 1, 1, 1]);
    sum(&mut packet);
    let destination = SocketAddrV4::new(Ipv4Addr::new(1, 1, 1, 1), 443);
    let bytes = ip(&packet);
    let datagram =
        Datagram { source_port: 5300, destination, payload: b"question", packet: &packet };
    assert_eq!(read(&bytes, &ENDS), Frame::Udp(datagram));
    assert!(reply::prohibited(&ENDS, &packet).is_some());
}

#[test]
fn d6_spoofed_tagged_and_ipv6_frames_are_dropped() {
    let mut other_mac = ip(&dns());
    other_mac[11] ^= 1;
    assert_eq!(dropped(&other_mac), Some(Drop::Spoofed));
    let mut other_ip = dns();
    other_ip[15] ^= 1;
    sum(&mut other_ip);
    assert_eq!(dropped(&ip(&other_ip)), Some(Drop::Spoofed));
    for kind in [0x8100, 0x88a8, 0x9100] {
        assert_eq!(dropped(&ethernet(kind, &dns())), Some(Drop::Tagged));
    }
    assert_eq!(dropped(&ethernet(0x86dd, &[0x60; 60])), Some(Drop::Ipv6));
    assert_eq!(dropped(&ethernet(0x88cc, &[0; 60])), Some(Drop::Protocol));
}

#[test]
fn arp_of_another_address_is_dropped() {
    let ask = |sender: Ipv4Addr, hardware: EthernetAddress, target: Ipv4Addr| {
        let mut arp = vec![0, 1, 8, 0, 6, 4, 0, 1];
        arp.extend(hardware.0);
        arp.extend(sender.octets());
        arp.extend([0; 6]);
        arp.extend(target.octets());
        ethernet(0x0806, &arp)
    };
    let bytes = ask(GUEST_IP, GUEST, GATEWAY_IP);
    assert_eq!(read(&bytes, &ENDS), Frame::ArpRequest { sender_ip: GUEST_IP });
    let sibling = Ipv4Addr::new(10, 0, 2, 16);
    assert_eq!(dropped(&ask(sibling, GUEST, GATEWAY_IP)), Some(Drop::Spoofed));
    assert_eq!(dropped(&ask(GUEST_IP, GATEWAY, GATEWAY_IP)), Some(Drop::Spoofed));
    assert_eq!(read(&ask(GUEST_IP, GUEST, sibling), &ENDS), Frame::Ignored);
}

#[test]
fn fragment_is_dropped() {
    for flags in [[0x20, 0], [0, 1], [0x20, 5], [0x1f, 0xff]] {
        let mut packet = dns();
        packet[6..8].copy_from_slice(&flags);
        sum(&mut packet);
        assert_eq!(dropped(&ip(&packet)), Some(Drop::Fragment), "{flags:?}");
    }
}

#[test]
fn packet_with_a_wrong_length_or_checksum_is_dropped() {
    let good = dns();
    for (at, value) in [(0, 0x44), (0, 0x4f), (0, 0x65), (2, 0xff), (3, 10), (10, 0), (25, 7)] {
        let mut packet = good.clone();
        packet[at] = value;
        if at != 10 {
            sum(&mut packet);
        }
        assert_eq!(dropped(&ip(&packet)), Some(Drop::Malformed), "{at} {value}");
    }
    assert_eq!(dropped(&ip(&[0x45; 1501])), Some(Drop::Malformed));
}

#[test]
fn datagram_with_a_wrong_length_or_checksum_is_dropped() {
    let mut good = reply::datagram(&MIRRORED, SocketAddrV4::new(GUEST_IP, 53), 53, b"question");
    assert!(matches!(read(&ip(&good), &ENDS), Frame::Dns { message: b"question", .. }));
    // The length: less than a header, more than the packet, and one that leaves a byte out.
    for (at, value) in [(25, 7), (25, 17), (24, 1), (25, 15), (26, 0xff), (28, b'Q')] {
        let mut packet = good.clone();
        packet[at] = value;
        assert_eq!(dropped(&ip(&packet)), Some(Drop::Malformed), "{at} {value}");
    }
    good.truncate(27);
    good[3] = 27;
    sum(&mut good);
    assert_eq!(dropped(&ip(&good)), Some(Drop::Malformed), "half a header");
}

#[test]
fn segment_shows_its_ends_and_is_refused_by_a_reset() {
    let segment = Segment {
        source_port: 80,
        destination: SocketAddrV4::new(GUEST_IP, 40000),
        syn: false,
        ack: false,
        rst: false,
        sequence: 7,
        acknowledged: 0,
        len: 1,
        packet: &[],
    };
    let packet = reply::reset(&MIRRORED, &segment).unwrap();
    let bytes = ip(&packet);
    let Frame::Tcp(read) = read(&bytes, &ENDS) else { panic!("no segment") };
    assert_eq!((read.source_port, read.rst, read.acknowledged), (40000, true, 8));
    assert_eq!(read.destination, SocketAddrV4::new(GATEWAY_IP, 80));
    assert_eq!(reply::reset(&ENDS, &read), None, "a reset is never answered");
}

#[test]
fn echo_is_answered_by_the_gateway_only() {
    let mut packet = reply::echo(&MIRRORED, 1, 2, b"data");
    // Type 8 in place of 0, with the checksum that this changes.
    packet[20] = 8;
    let body = &mut packet[20..];
    Icmpv4Packet::new_unchecked(body).fill_checksum();
    let echo = Frame::Echo { ident: 1, sequence: 2, data: b"data" };
    assert_eq!(read(&ip(&packet), &ENDS), echo);
    packet[16..20].copy_from_slice(&[1, 1, 1, 1]);
    sum(&mut packet);
    assert_eq!(dropped(&ip(&packet)), Some(Drop::Protocol));
}

#[test]
fn changed_frames_are_read_without_panic() {
    let tcp = reply::reset(
        &MIRRORED,
        &Segment {
            source_port: 80,
            destination: SocketAddrV4::new(GUEST_IP, 1),
            syn: true,
            ack: false,
            rst: false,
            sequence: -1,
            acknowledged: 0,
            len: 1,
            packet: &[],
        },
    );
    for frame in [ip(&dns()), ip(&tcp.unwrap()), ip(&reply::echo(&MIRRORED, 1, 2, b"x"))] {
        for len in 0..frame.len() {
            read(&frame[..len], &ENDS);
        }
        for at in 0..frame.len() {
            for value in 0..=255 {
                let mut changed = frame.clone();
                changed[at] = value;
                if at >= 14 {
                    sum(&mut changed[14..]);
                }
                read(&changed, &ENDS);
            }
        }
    }
}
