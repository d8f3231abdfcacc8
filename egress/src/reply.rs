//! The packets that the gateway writes itself: answers to ARP, echo and DNS, datagrams, refusals
//! and probes.
//!
//! The functions are pure: fields in, bytes out. TCP of accepted connections is smoltcp's work.

use std::net::{Ipv4Addr, SocketAddrV4};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, Icmpv4DstUnreachable, Icmpv4Packet, Icmpv4Repr, IpAddress,
    IpProtocol, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber, UdpPacket,
    UdpRepr,
};

use crate::connection::ConnectionKey;
use crate::frame::{Ends, Segment};

const HOP_LIMIT: u8 = 64;
/// The bytes of a datagram that its refusal repeats after the IP header (RFC 792).
const REPEATED: usize = 8;

/// Answers a request for the gateway's hardware address.
pub fn arp(ends: &Ends, sender_ip: Ipv4Addr) -> Option<Vec<u8>> {
    let repr = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: ends.gateway_mac,
        source_protocol_addr: ends.gateway_ip,
        target_hardware_addr: ends.guest_mac?,
        target_protocol_addr: sender_ip,
    };
    let mut bytes = vec![0; repr.buffer_len()];
    repr.emit(&mut ArpPacket::new_unchecked(&mut bytes[..]));
    Some(bytes)
}

/// Answers an echo request.
pub fn echo(ends: &Ends, ident: u16, sequence: u16, data: &[u8]) -> Vec<u8> {
    icmp(ends, ends.gateway_ip, &Icmpv4Repr::EchoReply { ident, seq_no: sequence, data })
}

/// Tells the guest that a datagram is administratively prohibited, so that a client of QUIC goes on
/// with TCP at once. `packet` is the IP packet that is refused.
pub fn prohibited(ends: &Ends, packet: &[u8]) -> Option<Vec<u8>> {
    let refused = Ipv4Packet::new_checked(packet).ok()?;
    let header = Ipv4Repr::parse(&refused, &ChecksumCapabilities::default()).ok()?;
    let data = refused.payload();
    let reason = Icmpv4DstUnreachable::CommProhibited;
    let data = &data[..data.len().min(REPEATED)];
    Some(icmp(ends, ends.gateway_ip, &Icmpv4Repr::DstUnreachable { reason, header, data }))
}

/// Tells the guest that the datagrams of an association do not arrive. Its kernel finds the socket
/// by the ends of the datagram that the message repeats, so the rest of it need not be true.
pub fn unreachable(ends: &Ends, key: &ConnectionKey, reason: Icmpv4DstUnreachable) -> Vec<u8> {
    let (to, port) = (*key.destination.ip(), key.destination.port());
    let header = Ipv4Repr {
        src_addr: ends.guest_ip,
        dst_addr: to,
        next_header: IpProtocol::Udp,
        payload_len: REPEATED,
        hop_limit: HOP_LIMIT,
    };
    let [from, to, len] = [key.guest_port, port, REPEATED as u16].map(u16::to_be_bytes);
    let data = [from[0], from[1], to[0], to[1], len[0], len[1], 0, 0];
    let repr = Icmpv4Repr::DstUnreachable { reason, header, data: &data };
    icmp(ends, ends.gateway_ip, &repr)
}

/// Wraps an answer to a DNS question.
pub fn dns(ends: &Ends, guest_port: u16, message: &[u8]) -> Vec<u8> {
    datagram(ends, SocketAddrV4::new(ends.gateway_ip, 53), guest_port, message)
}

/// Wraps what a remote end sends to a port of the guest.
pub fn datagram(ends: &Ends, from: SocketAddrV4, guest_port: u16, payload: &[u8]) -> Vec<u8> {
    let repr = UdpRepr { src_port: from.port(), dst_port: guest_port };
    let len = repr.header_len() + payload.len();
    let ends_of = (IpAddress::Ipv4(*from.ip()), IpAddress::Ipv4(ends.guest_ip));
    ipv4(*from.ip(), ends.guest_ip, IpProtocol::Udp, len, |body| {
        let mut datagram = UdpPacket::new_unchecked(body);
        let fill = |room: &mut [u8]| room.copy_from_slice(payload);
        let sums = ChecksumCapabilities::default();
        repr.emit(&mut datagram, &ends_of.0, &ends_of.1, payload.len(), fill, &sums);
    })
}

/// Refuses a segment: a reset as of RFC 9293 section 3.10.7.1. A reset is never answered.
pub fn reset(ends: &Ends, segment: &Segment<'_>) -> Option<Vec<u8>> {
    if segment.rst {
        return None;
    }
    let end = TcpSeqNumber(segment.sequence) + segment.len;
    let numbers = if segment.ack {
        (TcpSeqNumber(segment.acknowledged), None)
    } else {
        (TcpSeqNumber(0), Some(end))
    };
    let ports = (segment.destination, segment.source_port);
    Some(bare_segment(ends, ports, TcpControl::Rst, numbers))
}

/// Asks the guest's kernel for the state of a connection: an acknowledgement, most probably outside
/// of the window, is answered with one at the right number (RFC 9293 section 3.10.7.4), and with a
/// reset if there is no such connection.
pub fn probe(ends: &Ends, key: &ConnectionKey, sequence: i32) -> Vec<u8> {
    let numbers = (TcpSeqNumber(sequence), Some(TcpSeqNumber(sequence)));
    bare_segment(ends, (key.destination, key.guest_port), TcpControl::None, numbers)
}

fn bare_segment(
    ends: &Ends,
    (from, guest_port): (SocketAddrV4, u16),
    control: TcpControl,
    (seq_number, ack_number): (TcpSeqNumber, Option<TcpSeqNumber>),
) -> Vec<u8> {
    let repr = TcpRepr {
        src_port: from.port(),
        dst_port: guest_port,
        control,
        seq_number,
        ack_number,
        window_len: 0,
        window_scale: None,
        max_seg_size: None,
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let ends_of = (IpAddress::Ipv4(*from.ip()), IpAddress::Ipv4(ends.guest_ip));
    ipv4(*from.ip(), ends.guest_ip, IpProtocol::Tcp, repr.buffer_len(), |body| {
        let mut packet = TcpPacket::new_unchecked(body);
        repr.emit(&mut packet, &ends_of.0, &ends_of.1, &ChecksumCapabilities::default());
    })
}

fn icmp(ends: &Ends, from: Ipv4Addr, repr: &Icmpv4Repr<'_>) -> Vec<u8> {
    ipv4(from, ends.guest_ip, IpProtocol::Icmp, repr.buffer_len(), |body| {
        repr.emit(&mut Icmpv4Packet::new_unchecked(body), &ChecksumCapabilities::default());
    })
}

fn ipv4(
    from: Ipv4Addr,
    to: Ipv4Addr,
    next_header: IpProtocol,
    payload_len: usize,
    emit: impl FnOnce(&mut [u8]),
) -> Vec<u8> {
    let (src_addr, dst_addr) = (from, to);
    let repr = Ipv4Repr { src_addr, dst_addr, next_header, payload_len, hop_limit: HOP_LIMIT };
    let mut bytes = vec![0; repr.buffer_len() + payload_len];
    let mut packet = Ipv4Packet::new_unchecked(&mut bytes[..]);
    repr.emit(&mut packet, &ChecksumCapabilities::default());
    emit(packet.payload_mut());
    bytes
}
