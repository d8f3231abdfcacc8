//! A guest and the real gateway process: what arrives, what is denied, and how fast.
//!
//! Loopback is a range that no rule opens by accident, so tests open it in so many words.
#![allow(clippy::unwrap_used, reason = "a fixture that cannot be set up should end its test")]

mod allowed;
mod control;
mod datagrams;
mod denied;
mod fixture;
mod hostile;
mod inherited;
mod process;
mod secrets;

use std::net::{Ipv4Addr, SocketAddrV4};

use fixture::{GATEWAY_IP, GATEWAY_MAC, GUEST_IP, GUEST_MAC};
use smoltcp::wire::checksum;

const ETHERNET: usize = 14;
const IP: usize = 20;

/// Returns an HTTP request to a host.
fn http(host: &str) -> Vec<u8> {
    format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes()
}

/// Returns the ClientHello of a client that wants a name.
fn tls_hello(name: &str) -> Vec<u8> {
    client_hello(name, &[])
}

/// Returns a ClientHello with an outer name and an encrypted part.
fn encrypted_hello(name: &str) -> Vec<u8> {
    client_hello(name, &[0xfe, 0x0d, 0, 1, 0])
}

fn client_hello(name: &str, more: &[u8]) -> Vec<u8> {
    let with_len = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat();
    let entry = [&[0][..], &with_len(name.as_bytes())].concat();
    let sni = [&[0, 0][..], &with_len(&with_len(&entry))].concat();
    let extensions = with_len(&[&sni[..], more].concat());
    let body = [&[3, 3][..], &[7; 32], &[0, 0, 2, 0x13, 1, 1, 0], &extensions].concat();
    let message = [&[1, 0][..], &with_len(&body)].concat();
    [&[22, 3, 1][..], &with_len(&message)].concat()
}

/// Returns the first segment of a handshake.
fn syn(from: Ipv4Addr, to: SocketAddrV4, source_port: u16) -> Vec<u8> {
    let mut segment = vec![0; 20];
    segment[..2].copy_from_slice(&source_port.to_be_bytes());
    segment[2..4].copy_from_slice(&to.port().to_be_bytes());
    segment[7] = 1;
    segment[12] = 5 << 4;
    segment[13] = 2;
    segment[14..16].copy_from_slice(&[0xff, 0xff]);
    let mut frame = packet(from, *to.ip(), 6, &segment);
    fill_tcp_checksum(&mut frame);
    frame
}

/// Returns a datagram of the guest, without a checksum.
fn udp(to: Ipv4Addr, port: u16) -> Vec<u8> {
    udp_from(5000, to, port)
}

/// Returns such a datagram from a port of the guest.
fn udp_from(source_port: u16, to: Ipv4Addr, port: u16) -> Vec<u8> {
    let ports = [source_port.to_be_bytes(), port.to_be_bytes()].concat();
    let datagram = [&ports[..], &[0, 12, 0, 0], b"quic"].concat();
    packet(GUEST_IP, to, 17, &datagram)
}

/// Returns an echo request to the gateway.
fn echo_request() -> Vec<u8> {
    let mut body = vec![8, 0, 0, 0, 0, 1, 0, 2, 9, 9];
    let sum = !checksum::data(&body);
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    packet(GUEST_IP, GATEWAY_IP, 1, &body)
}

fn packet(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, body: &[u8]) -> Vec<u8> {
    let len = ((IP + body.len()) as u16).to_be_bytes();
    let mut frame = [&GATEWAY_MAC[..], &GUEST_MAC, &[8, 0]].concat();
    frame.extend([0x45, 0, len[0], len[1], 0, 0, 0x40, 0, 64, protocol, 0, 0]);
    frame.extend(from.octets());
    frame.extend(to.octets());
    frame.extend(body);
    fill_ip_checksum(&mut frame);
    frame
}

/// Makes the checksum of the IP header right again.
fn fill_ip_checksum(frame: &mut [u8]) {
    frame[24..26].fill(0);
    let sum = !checksum::data(&frame[ETHERNET..ETHERNET + IP]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
}

/// Makes the checksum of the TCP segment right again.
fn fill_tcp_checksum(frame: &mut [u8]) {
    let start = ETHERNET + IP;
    frame[start + 16..start + 18].fill(0);
    let len = (frame.len() - start) as u16;
    let pseudo = [&frame[26..34], &[0, 6], &len.to_be_bytes()].concat();
    let sum = !checksum::combine(&[checksum::data(&pseudo), checksum::data(&frame[start..])]);
    frame[start + 16..start + 18].copy_from_slice(&sum.to_be_bytes());
}
