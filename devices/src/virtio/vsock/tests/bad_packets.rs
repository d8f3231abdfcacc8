//! Packets that a driver should never send, by their number in the catalogue.

use std::io::{Read, Write};

use super::guest::{CID, Guest, Ports, TX, is_closed, read_line};
use crate::virtio::testing::Buffer;
use crate::virtio::vsock::wire::{
    HEADER_LEN, HOST_CID, Header, MAX_PAYLOAD, Op, SHUTDOWN_SEND, TYPE_STREAM,
};

const NOBODY: Ports = Ports { host: 99, guest: 7 };

/// Checks that a connection is intact: bytes of the guest still reach `client`.
fn assert_alive(guest: &mut Guest, client: &mut std::os::unix::net::UnixStream, ports: Ports) {
    guest.send_data(ports, b"!");
    guest.expect_silence();
    let mut byte = [0];
    client.read_exact(&mut byte).unwrap();
}

#[test]
fn e1_chain_shorter_than_a_header_is_dropped() {
    let mut guest = Guest::new();
    for len in [1, 43] {
        guest.driver.send(TX, &[Buffer::Readable(&vec![1; len])]);
    }
    guest.driver.send(TX, &[Buffer::Writable(100)]);
    guest.expect_silence();
    assert_eq!(guest.driver.used_index(TX), 3);
}

#[test]
fn e1_length_that_differs_from_the_chain_is_reset() {
    for (claimed, given) in [(0, 1), (1, 0), (5, 4), (4, 5), (u32::MAX, 4), (MAX_PAYLOAD, 1)] {
        let mut guest = Guest::new();
        let (mut client, ports) = guest.connected_client();
        guest.send_raw(&guest.header(ports, Op::Data, claimed), &vec![7; given]);
        guest.expect(Op::Reset);
        assert!(is_closed(&mut client), "{claimed} {given}");
    }
}

#[test]
fn e2_payload_longer_than_64_kib_is_reset() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    let len = MAX_PAYLOAD + 1;
    guest.send_raw(&guest.header(ports, Op::Data, len), &vec![7; len as usize]);
    guest.expect(Op::Reset);
    assert!(is_closed(&mut client));
}

#[test]
fn e3_packet_from_or_to_a_wrong_address_is_dropped() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    let header = guest.header(ports, Op::Reset, 0);
    let any = u64::from(u32::MAX);
    for src_cid in [0, 1, HOST_CID, CID + 1, any, CID | 1 << 32] {
        guest.send_raw(&Header { src_cid, ..header }, &[]);
    }
    for dst_cid in [0, 1, CID, any, HOST_CID | 1 << 32] {
        guest.send_raw(&Header { dst_cid, ..header }, &[]);
    }
    assert_alive(&mut guest, &mut client, ports);
}

#[test]
fn e4_unknown_operation_or_type_is_reset() {
    let mut guest = Guest::new();
    let header = guest.header(NOBODY, Op::Request, 0);
    let wrong = [
        Header { op: 0, ..header },
        Header { op: 8, ..header },
        Header { op: u16::MAX, ..header },
        Header { kind: 0, ..header },
        Header { kind: 2, ..header },
    ];
    for header in wrong {
        guest.send_raw(&header, &[]);
        let (reset, _) = guest.expect(Op::Reset);
        assert_eq!((reset.src_port, reset.dst_port), (NOBODY.host, NOBODY.guest));
        assert_eq!(reset.kind, header.kind);
    }
}

#[test]
fn e4_unknown_operation_on_a_connection_ends_it() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    guest.send_raw(&Header { op: 77, ..guest.header(ports, Op::Data, 0) }, &[]);
    let (reset, _) = guest.expect(Op::Reset);
    assert_eq!(reset.kind, TYPE_STREAM);
    assert!(is_closed(&mut client));
}

#[test]
fn reset_for_nobody_is_not_answered() {
    let mut guest = Guest::new();
    guest.send(NOBODY, Op::Reset);
    guest.send_raw(&Header { kind: 9, len: 77, ..guest.header(NOBODY, Op::Reset, 0) }, &[]);
    guest.expect_silence();
}

#[test]
fn packet_for_nobody_is_reset() {
    let mut guest = Guest::new();
    let ops = [Op::Response, Op::Shutdown, Op::Data, Op::CreditUpdate, Op::CreditRequest];
    for op in ops {
        guest.send(NOBODY, op);
        guest.expect(Op::Reset);
    }
}

#[test]
fn e6_second_request_for_a_live_pair_is_reset() {
    let mut guest = Guest::new();
    let listener = guest.listen(1025);
    let ports = Ports { host: 1025, guest: 7000 };
    let mut host = guest.connected_guest(&listener, ports);
    guest.send(ports, Op::Request);
    guest.expect(Op::Reset);
    assert!(is_closed(&mut host));
    guest.expect_silence();
}

#[test]
fn e7_data_before_the_response_is_reset() {
    let mut guest = Guest::new();
    let mut client = guest.client("CONNECT 1024\n");
    let (request, _) = guest.expect(Op::Request);
    let ports = Ports { host: request.src_port, guest: 1024 };
    guest.send_data(ports, b"hasty");
    guest.expect(Op::Reset);
    assert!(is_closed(&mut client));
}

#[test]
fn e7_data_before_our_response_was_seen_is_reset() {
    let mut guest = Guest::without_buffers(Default::default());
    let listener = guest.listen(1025);
    let ports = Ports { host: 1025, guest: 7000 };
    guest.send(ports, Op::Request);
    guest.send_data(ports, b"hasty");
    guest.run();
    guest.post_all();
    guest.expect(Op::Reset);
    assert!(is_closed(&mut listener.accept().unwrap().0));
}

#[test]
fn e7_data_after_shutdown_is_reset() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    guest.send_shutdown(ports, SHUTDOWN_SEND);
    guest.send_data(ports, b"afterthought");
    guest.expect(Op::Reset);
    assert!(is_closed(&mut client));
}

#[test]
fn response_without_a_request_or_twice_is_reset() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    guest.send(ports, Op::Response);
    guest.expect(Op::Reset);
    assert!(is_closed(&mut client));
}

#[test]
fn payload_on_a_control_packet_is_reset() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    guest.send_raw(&guest.header(ports, Op::CreditUpdate, 3), b"abc");
    guest.expect(Op::Reset);
    assert!(is_closed(&mut client));
}

#[test]
fn e10_guest_that_ignores_our_credit_is_reset() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    // The host does not read, so after its socket buffer only the window is left.
    let chunk = vec![1; MAX_PAYLOAD as usize];
    for _ in 0..32 {
        guest.send_data(ports, &chunk);
        guest.run();
    }
    let mut last = None;
    while let Some((header, _)) = guest.receive() {
        last = Op::from_raw(header.op);
    }
    assert_eq!(last, Some(Op::Reset));
    client.write_all(b"x").unwrap_err();
}

#[test]
fn receive_buffer_too_small_for_a_header_is_returned_unused() {
    let mut guest = Guest::without_buffers(Default::default());
    let mut client = guest.client("CONNECT 1024\n");
    for len in [0, 1, HEADER_LEN as u32] {
        guest.driver.send(super::guest::RX, &[Buffer::Writable(len)]);
    }
    guest.driver.send(super::guest::RX, &[Buffer::Readable(b"not for you")]);
    guest.run();
    for _ in 0..4 {
        assert_eq!(guest.driver.used(super::guest::RX).unwrap().len, 0);
    }
    // The heads that the mock placed are used up; the fixed ones come next.
    for _ in 0..4 {
        guest.skip_slot();
    }
    guest.post_all();
    let (request, _) = guest.expect(Op::Request);
    guest.send(Ports { host: request.src_port, guest: 1024 }, Op::Response);
    guest.run();
    read_line(&mut client);
}

#[test]
fn malformed_ring_ends_in_a_plea_for_reset_and_clients_are_let_go() {
    let mut guest = Guest::new();
    let (mut client, _) = guest.connected_client();
    guest.driver.set_avail_index(TX, 5000);
    guest.driver.kick(TX);
    guest.run();
    assert!(guest.driver.needs_reset());
    assert!(is_closed(&mut client));
    let mut late = guest.client("CONNECT 1024\n");
    guest.run();
    assert!(is_closed(&mut late));
}
