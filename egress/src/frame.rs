//! Frames of the guest: the few kinds that are carried, and why another is dropped.
//!
//! The functions are pure. Nothing else in this crate reads bytes of a frame before this file has
//! checked lengths, checksums and addresses.

use std::net::{Ipv4Addr, SocketAddrV4};

use serde::Serialize;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol, Icmpv4Packet, Icmpv4Repr,
    IpAddress, IpProtocol, Ipv4Packet, TcpPacket, UdpPacket,
};

/// The longest IP packet.
pub const MTU: usize = 1500;
/// The length of an Ethernet header.
pub const ETHERNET_LEN: usize = 14;
const DNS_PORT: u16 = 53;

/// The two ends of the link, by hardware and IP address.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// Taken from the first frame if None.
    pub guest_mac: Option<EthernetAddress>,
    pub guest_ip: Ipv4Addr,
    pub gateway_mac: EthernetAddress,
    pub gateway_ip: Ipv4Addr,
}

/// A frame of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// The guest asks for the gateway's hardware address.
    ArpRequest {
        sender_ip: Ipv4Addr,
    },
    /// An echo request to the gateway.
    Echo {
        ident: u16,
        sequence: u16,
        data: &'a [u8],
    },
    /// A DNS message to the gateway.
    Dns {
        source_port: u16,
        message: &'a [u8],
    },
    Tcp(Segment<'a>),
    /// A datagram to an address other than the gateway's DNS server.
    Udp(Datagram<'a>),
    /// A frame that every host sends and that needs no answer.
    Ignored,
    Dropped(Drop),
}

/// A TCP segment: the fields that decide what happens to it, and its IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    pub source_port: u16,
    pub destination: SocketAddrV4,
    pub syn: bool,
    pub ack: bool,
    pub rst: bool,
    pub sequence: i32,
    pub acknowledged: i32,
    /// The length in sequence numbers.
    pub len: usize,
    pub packet: &'a [u8],
}

/// A UDP datagram, and its IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    pub source_port: u16,
    pub destination: SocketAddrV4,
    pub payload: &'a [u8],
    pub packet: &'a [u8],
}

/// Why a frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Drop {
    /// Too short, too long, or with a wrong length or checksum.
    Malformed,
    /// From a hardware or IP address that is not the guest's.
    Spoofed,
    /// With a VLAN tag.
    Tagged,
    Ipv6,
    Fragment,
    /// For a hardware address that is not the gateway's.
    NotForGateway,
    /// Of another protocol.
    Protocol,
}

/// Reads a frame of the guest.
pub fn read<'a>(bytes: &'a [u8], ends: &Ends) -> Frame<'a> {
    read_ethernet(bytes, ends).unwrap_or_else(Frame::Dropped)
}

/// Returns the source of a frame, if a host may have that address.
pub fn source(bytes: &[u8]) -> Option<EthernetAddress> {
    let source = EthernetFrame::new_checked(bytes).ok()?.src_addr();
    source.is_unicast().then_some(source)
}

fn read_ethernet<'a>(bytes: &'a [u8], ends: &Ends) -> Result<Frame<'a>, Drop> {
    let frame = EthernetFrame::new_checked(bytes).map_err(|_| Drop::Malformed)?;
    if bytes.len() > ETHERNET_LEN + MTU {
        return Err(Drop::Malformed);
    }
    if Some(frame.src_addr()) != ends.guest_mac {
        return Err(Drop::Spoofed);
    }
    match frame.ethertype() {
        EthernetProtocol::Arp => read_arp(frame.payload(), ends),
        EthernetProtocol::Ipv4 if frame.dst_addr() != ends.gateway_mac => Err(Drop::NotForGateway),
        EthernetProtocol::Ipv4 => read_ipv4(frame.payload(), ends),
        EthernetProtocol::Ipv6 => Err(Drop::Ipv6),
        EthernetProtocol::Unknown(0x8100 | 0x88a8 | 0x9100) => Err(Drop::Tagged),
        EthernetProtocol::Unknown(_) => Err(Drop::Protocol),
    }
}

fn read_arp<'a>(payload: &[u8], ends: &Ends) -> Result<Frame<'a>, Drop> {
    let packet = ArpPacket::new_checked(payload).map_err(|_| Drop::Malformed)?;
    let Ok(ArpRepr::EthernetIpv4 {
        operation,
        source_hardware_addr,
        source_protocol_addr,
        target_protocol_addr,
        ..
    }) = ArpRepr::parse(&packet)
    else {
        return Err(Drop::Malformed);
    };
    // A host that probes for its own address has none yet.
    let known = [ends.guest_ip, Ipv4Addr::UNSPECIFIED].contains(&source_protocol_addr);
    if Some(source_hardware_addr) != ends.guest_mac || !known {
        return Err(Drop::Spoofed);
    }
    let asks = operation == smoltcp::wire::ArpOperation::Request;
    if asks && target_protocol_addr == ends.gateway_ip {
        return Ok(Frame::ArpRequest { sender_ip: source_protocol_addr });
    }
    Ok(Frame::Ignored)
}

fn read_ipv4<'a>(payload: &'a [u8], ends: &Ends) -> Result<Frame<'a>, Drop> {
    let packet = Ipv4Packet::new_checked(payload).map_err(|_| Drop::Malformed)?;
    if packet.version() != 4 || packet.header_len() < 20 || !packet.verify_checksum() {
        return Err(Drop::Malformed);
    }
    if packet.src_addr() != ends.guest_ip {
        return Err(Drop::Spoofed);
    }
    if packet.more_frags() || packet.frag_offset() != 0 {
        return Err(Drop::Fragment);
    }
    // Without what follows the packet in its frame.
    let whole = payload.get(..usize::from(packet.total_len())).ok_or(Drop::Malformed)?;
    let body = whole.get(usize::from(packet.header_len())..).ok_or(Drop::Malformed)?;
    let to = packet.dst_addr();
    match packet.next_header() {
        IpProtocol::Tcp => read_tcp(whole, body, ends.guest_ip, to),
        IpProtocol::Udp => read_udp(whole, body, ends, to),
        IpProtocol::Icmp if to == ends.gateway_ip => read_echo(body),
        _ => Err(Drop::Protocol),
    }
}

fn read_tcp<'a>(
    packet: &'a [u8],
    body: &'a [u8],
    from: Ipv4Addr,
    to: Ipv4Addr,
) -> Result<Frame<'a>, Drop> {
    let segment = TcpPacket::new_checked(body).map_err(|_| Drop::Malformed)?;
    let ports = (segment.src_port(), segment.dst_port());
    let sum = segment.verify_checksum(&IpAddress::Ipv4(from), &IpAddress::Ipv4(to));
    let odd = segment.syn() && (segment.fin() || segment.rst());
    if ports.0 == 0 || ports.1 == 0 || odd || !sum {
        return Err(Drop::Malformed);
    }
    Ok(Frame::Tcp(Segment {
        source_port: ports.0,
        destination: SocketAddrV4::new(to, ports.1),
        syn: segment.syn(),
        ack: segment.ack(),
        rst: segment.rst(),
        sequence: segment.seq_number().0,
        acknowledged: segment.ack_number().0,
        len: segment.segment_len(),
        packet,
    }))
}

fn read_udp<'a>(
    packet: &'a [u8],
    body: &'a [u8],
    ends: &Ends,
    to: Ipv4Addr,
) -> Result<Frame<'a>, Drop> {
    let datagram = UdpPacket::new_checked(body).map_err(|_| Drop::Malformed)?;
    let (source_port, port) = (datagram.src_port(), datagram.dst_port());
    let sum = datagram.verify_checksum(&IpAddress::Ipv4(ends.guest_ip), &IpAddress::Ipv4(to));
    let end = usize::from(datagram.len());
    let payload = body.get(8..end).ok_or(Drop::Malformed)?;
    if source_port == 0 || port == 0 || !sum {
        return Err(Drop::Malformed);
    }
    if to == ends.gateway_ip && port == DNS_PORT {
        return Ok(Frame::Dns { source_port, message: payload });
    }
    let destination = SocketAddrV4::new(to, port);
    Ok(Frame::Udp(Datagram { source_port, destination, payload, packet }))
}

fn read_echo(body: &[u8]) -> Result<Frame<'_>, Drop> {
    let packet = Icmpv4Packet::new_checked(body).map_err(|_| Drop::Malformed)?;
    match Icmpv4Repr::parse(&packet, &ChecksumCapabilities::default()) {
        Ok(Icmpv4Repr::EchoRequest { ident, seq_no, .. }) => {
            let data = body.get(8..).ok_or(Drop::Malformed)?;
            Ok(Frame::Echo { ident, sequence: seq_no, data })
        }
        Ok(_) => Err(Drop::Protocol),
        Err(_) => Err(Drop::Malformed),
    }
}

#[cfg(test)]
mod tests;
