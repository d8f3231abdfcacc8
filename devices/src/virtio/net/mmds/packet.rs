//! The bytes of ARP, IPv4 and TCP: parses the frames of a guest and builds the frames that answer
//! them.
//!
//! The code is pure. Every length is checked here, once; results refer only to bytes that exist.

use std::net::Ipv4Addr;

use super::super::wire::ETHERNET_LEN;

/// The hardware address of the service. It is locally administered, and the one that clients
/// expect.
pub const SERVICE_MAC: [u8; 6] = [0x06, 0x01, 0x23, 0x45, 0x67, 0x01];

/// The number of bytes after the Ethernet header that tell whether a frame is for the service.
pub const PEEK_LEN: usize = ARP_LEN;
/// The longest segment that the service sends, without headers.
pub const MSS: u16 = 1460;
/// The longest frame that the service sends.
pub const SENT_MAX: usize = ETHERNET_LEN + IPV4_LEN + TCP_LEN + MSS as usize;

const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TYPE_ARP: [u8; 2] = [0x08, 0x06];
const ARP_LEN: usize = 28;
const IPV4_LEN: usize = 20;
const TCP_LEN: usize = 20;
const PROTOCOL_TCP: u8 = 6;
// Ethernet and IPv4, with addresses of six and four bytes; a request.
const ARP_REQUEST: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
const ARP_REPLY: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 2];

/// Flags of a TCP segment.
pub mod flag {
    pub const FIN: u8 = 0x01;
    pub const SYN: u8 = 0x02;
    pub const RST: u8 = 0x04;
    pub const PSH: u8 = 0x08;
    pub const ACK: u8 = 0x10;
}

/// An ARP request for the service's hardware address, and its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArpRequest {
    pub ip: Ipv4Addr,
}

/// The client's end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    pub ip: Ipv4Addr,
    pub port: u16,
}

/// A received TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    pub peer: Peer,
    /// The destination port.
    pub port: u16,
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    /// The longest segment that the peer accepts, if it sent that option.
    pub mss: Option<u16>,
    pub payload: &'a [u8],
}

/// A TCP segment to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing<'a> {
    pub peer: Peer,
    pub port: u16,
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    pub payload: &'a [u8],
}

/// A parsed frame for the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    Arp(ArpRequest),
    Tcp(Segment<'a>),
}

/// Returns whether a frame is for `service`, by the Ethernet header and the bytes that follow.
/// Everything sent to that address counts, whatever its protocol: none of it may leave the machine.
pub fn is_for(service: Ipv4Addr, ethernet: &[u8; ETHERNET_LEN], payload: &[u8]) -> bool {
    let target = match [ethernet[12], ethernet[13]] {
        TYPE_ARP => payload.get(24..28),
        TYPE_IPV4 => payload.get(16..20),
        _ => None,
    };
    target == Some(&service.octets()[..])
}

/// Parses a whole frame that `is_for` accepted. Returns None if there is nothing to answer: it is
/// truncated, a fragment, of another protocol, or sent from an address that no single machine has.
pub fn parse(frame: &[u8]) -> Option<Frame<'_>> {
    let (ethernet, payload) = frame.split_at_checked(ETHERNET_LEN)?;
    match [ethernet[12], ethernet[13]] {
        TYPE_ARP => parse_arp(payload).map(Frame::Arp),
        TYPE_IPV4 => parse_ipv4(payload).map(Frame::Tcp),
        _ => None,
    }
}

fn parse_arp(packet: &[u8]) -> Option<ArpRequest> {
    let packet = packet.get(..ARP_LEN)?;
    (packet[..8] == ARP_REQUEST).then(|| ArpRequest { ip: ipv4(&packet[14..18]) })
}

fn parse_ipv4(packet: &[u8]) -> Option<Segment<'_>> {
    let header_len = usize::from(packet.first()? & 0xf) * 4;
    if packet[0] >> 4 != 4 || header_len < IPV4_LEN {
        return None;
    }
    let header = packet.get(..header_len)?;
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    // Neither the first of several fragments nor a later one.
    let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
    let from = ipv4(&header[12..16]);
    let nobody = from.is_unspecified() || from.is_broadcast() || from.is_multicast();
    if fragment || nobody || header[9] != PROTOCOL_TCP || checksum(&[header]) != 0 {
        return None;
    }
    // Bytes after the packet are padding.
    parse_tcp(from, packet.get(header_len..total)?)
}

/// Parses a TCP segment. The checksum is not checked: the frame came through memory, and its sender
/// may have left the checksum to the host.
fn parse_tcp(from: Ipv4Addr, segment: &[u8]) -> Option<Segment<'_>> {
    let header_len = usize::from(segment.get(12)? >> 4) * 4;
    if header_len < TCP_LEN {
        return None;
    }
    let (header, payload) = segment.split_at_checked(header_len)?;
    let u16_at = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let u32_at = |at: usize| {
        u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    Some(Segment {
        peer: Peer { ip: from, port: u16_at(0) },
        port: u16_at(2),
        seq: u32_at(4),
        ack: u32_at(8),
        flags: header[13],
        window: u16_at(14),
        mss: mss_option(&header[TCP_LEN..]),
        payload,
    })
}

fn mss_option(mut options: &[u8]) -> Option<u16> {
    loop {
        match *options {
            [2, 4, high, low, ..] => return Some(u16::from_be_bytes([high, low])),
            [] | [0, ..] => return None,
            [1, ref rest @ ..] => options = rest,
            // An option has at least its kind and length, so that the loop ends.
            [_, len, ..] if len >= 2 => options = options.get(usize::from(len)..)?,
            _ => return None,
        }
    }
}

/// Builds the ARP reply with the service's address for `guest`.
pub fn arp_reply(service: Ipv4Addr, request: ArpRequest, guest: [u8; 6]) -> Vec<u8> {
    let mut frame = ethernet(guest, TYPE_ARP);
    frame.extend(ARP_REPLY);
    frame.extend(SERVICE_MAC);
    frame.extend(service.octets());
    frame.extend(guest);
    frame.extend(request.ip.octets());
    frame
}

/// Builds the frame of a segment. A SYN carries the service's maximum segment size.
pub fn tcp(service: Ipv4Addr, outgoing: &Outgoing, guest: [u8; 6]) -> Vec<u8> {
    let options: &[u8] = if outgoing.flags & flag::SYN != 0 {
        &[2, 4, MSS.to_be_bytes()[0], MSS.to_be_bytes()[1]]
    } else {
        &[]
    };
    let header_len = TCP_LEN + options.len();
    let mut segment = Vec::with_capacity(header_len + outgoing.payload.len());
    segment.extend(outgoing.port.to_be_bytes());
    segment.extend(outgoing.peer.port.to_be_bytes());
    segment.extend(outgoing.seq.to_be_bytes());
    segment.extend(outgoing.ack.to_be_bytes());
    segment.extend([(header_len as u8 / 4) << 4, outgoing.flags]);
    segment.extend(outgoing.window.to_be_bytes());
    segment.extend([0; 4]);
    segment.extend(options);
    segment.extend(outgoing.payload);
    let len = (segment.len() as u16).to_be_bytes();
    let (from, to) = (service.octets(), outgoing.peer.ip.octets());
    let sum = checksum(&[&from, &to, &[0, PROTOCOL_TCP], &len, &segment]);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());

    let total = ((IPV4_LEN + segment.len()) as u16).to_be_bytes();
    // Don't-fragment flag, and a TTL of one.
    let mut header = vec![0x45, 0, total[0], total[1], 0, 0, 0x40, 0, 1, PROTOCOL_TCP, 0, 0];
    header.extend(from);
    header.extend(to);
    let sum = checksum(&[&header]);
    header[10..12].copy_from_slice(&sum.to_be_bytes());

    let mut frame = ethernet(guest, TYPE_IPV4);
    frame.extend(header);
    frame.extend(segment);
    frame
}

fn ethernet(to: [u8; 6], kind: [u8; 2]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(SENT_MAX);
    frame.extend(to);
    frame.extend(SERVICE_MAC);
    frame.extend(kind);
    frame
}

fn ipv4(bytes: &[u8]) -> Ipv4Addr {
    let mut octets = [0; 4];
    octets.copy_from_slice(bytes);
    Ipv4Addr::from(octets)
}

/// Returns the internet checksum over parts that, except for the last, have an even length.
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u64;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SERVICE: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
    const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 9];

    fn syn(payload: &[u8]) -> Vec<u8> {
        let peer = Peer { ip: SERVICE, port: 80 };
        let (port, window) = (4000, 1000);
        let flags = flag::SYN;
        let outgoing = Outgoing { peer, port, seq: 7, ack: 9, flags, window, payload };
        tcp(Ipv4Addr::new(10, 0, 0, 2), &outgoing, GUEST)
    }

    #[test]
    fn segment_is_read_as_it_was_written() {
        let frame = syn(b"abc");
        let ethernet: [u8; ETHERNET_LEN] = frame[..ETHERNET_LEN].try_into().unwrap();
        assert!(is_for(SERVICE, &ethernet, &frame[ETHERNET_LEN..]));
        assert!(!is_for(Ipv4Addr::LOCALHOST, &ethernet, &frame[ETHERNET_LEN..]));
        let Some(Frame::Tcp(segment)) = parse(&frame) else { panic!() };
        assert_eq!((segment.seq, segment.ack, segment.window), (7, 9, 1000));
        assert_eq!((segment.peer.port, segment.port, segment.mss), (4000, 80, Some(MSS)));
        assert_eq!(segment.payload, b"abc");
        // Padding is ignored.
        let padded = [&frame[..], &[0xff; 9]].concat();
        assert_eq!(parse(&padded), parse(&frame));
    }

    #[test]
    fn fragment_other_protocol_and_nobodys_address_are_not_answered() {
        for (at, byte) in [(6, 0x20), (7, 1), (9, 17), (0, 0x65), (0, 0x44), (3, 19), (2, 0xff)] {
            let mut frame = syn(b"");
            frame[ETHERNET_LEN + at] = byte;
            // Fix the checksum, so that only this byte matters.
            frame[ETHERNET_LEN + 10..ETHERNET_LEN + 12].fill(0);
            let sum = checksum(&[&frame[ETHERNET_LEN..ETHERNET_LEN + IPV4_LEN]]).to_be_bytes();
            frame[ETHERNET_LEN + 10..ETHERNET_LEN + 12].copy_from_slice(&sum);
            assert_eq!(parse(&frame), None, "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_fault(frame in prop::collection::vec(any::<u8>(), 0..120)) {
            let _ = parse(&frame);
        }

        #[test]
        fn frame_cut_or_bent_anywhere_is_read_without_a_fault(
            at in 0usize..60, byte in any::<u8>(), len in 0usize..70,
        ) {
            let mut frame = syn(b"abcdef");
            if let Some(place) = frame.get_mut(at) {
                *place = byte;
            }
            frame.truncate(len);
            if let Some(Frame::Tcp(segment)) = parse(&frame) {
                prop_assert!(segment.payload.len() <= len);
            }
        }
    }
}
