//! Streams that work: both directions, both initiators, half-closed, long, many.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::thread;

use super::guest::{GUEST_WINDOW, Guest, Ports, RX, TX, pattern, read_line, read_rest};
use crate::virtio::testing::Buffer;
use crate::virtio::vsock::mux::Limits;
use crate::virtio::vsock::wire::{
    HEADER_LEN, Header, Op, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND,
};

const DIAL: Ports = Ports { host: 1025, guest: 7000 };

#[test]
fn client_that_asks_for_a_port_is_connected_and_answered() {
    let mut guest = Guest::new();
    let mut client = guest.client("CONNECT 1024\n");
    let (request, _) = guest.expect(Op::Request);
    assert_eq!(request.dst_port, 1024);
    assert!(request.buf_alloc > 0);
    guest.send(Ports { host: request.src_port, guest: 1024 }, Op::Response);
    guest.run();
    assert_eq!(read_line(&mut client), format!("OK {}\n", request.src_port));
}

#[test]
fn client_and_guest_exchange_bytes() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    client.write_all(b"ping").unwrap();
    assert_eq!(guest.expect(Op::Data).1, b"ping");
    guest.send_data(ports, b"pong");
    guest.run();
    let mut answer = [0; 4];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"pong");
}

#[test]
fn client_bytes_behind_the_request_are_data() {
    let mut guest = Guest::new();
    let mut client = guest.client("CONNECT 1024\nearly bird");
    let (request, _) = guest.expect(Op::Request);
    guest.expect_silence();
    guest.send(Ports { host: request.src_port, guest: 1024 }, Op::Response);
    assert_eq!(guest.expect(Op::Data).1, b"early bird");
    read_line(&mut client);
}

#[test]
fn client_whom_the_guest_refuses_is_closed() {
    let mut guest = Guest::new();
    let mut client = guest.client("CONNECT 1024\n");
    let (request, _) = guest.expect(Op::Request);
    guest.send(Ports { host: request.src_port, guest: 1024 }, Op::Reset);
    guest.expect_silence();
    assert_eq!(read_rest(&mut client), b"");
}

#[test]
fn guest_that_connects_to_a_listener_is_answered_and_heard() {
    let mut guest = Guest::new();
    let listener = guest.listen(DIAL.host);
    let mut host = guest.connected_guest(&listener, DIAL);
    guest.send_data(DIAL, b"hello");
    guest.run();
    let mut heard = [0; 5];
    host.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"hello");
    host.write_all(b"welcome").unwrap();
    assert_eq!(guest.expect(Op::Data).1, b"welcome");
}

#[test]
fn guest_that_says_one_word_and_closes_is_heard_and_confirmed() {
    let mut guest = Guest::new();
    let listener = guest.listen(DIAL.host);
    let mut host = guest.connected_guest(&listener, DIAL);
    guest.send_data(DIAL, b"ready");
    guest.send_shutdown(DIAL, SHUTDOWN_BOTH);
    guest.expect(Op::Reset);
    assert_eq!(read_rest(&mut host), b"ready");
    // The ports are free again.
    guest.connected_guest(&listener, DIAL);
}

#[test]
fn host_that_half_closes_can_still_listen() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(guest.expect(Op::Data).1, b"question");
    assert_eq!(guest.expect(Op::Shutdown).0.flags, SHUTDOWN_SEND);
    guest.send_data(ports, b"answer");
    guest.send_shutdown(ports, SHUTDOWN_BOTH);
    guest.expect(Op::Reset);
    assert_eq!(read_rest(&mut client), b"answer");
}

#[test]
fn guest_that_half_closes_can_still_listen() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    guest.send_data(ports, b"question");
    guest.send_shutdown(ports, SHUTDOWN_SEND);
    guest.expect_silence();
    assert_eq!(read_rest(&mut client), b"question");
    client.write_all(b"answer").unwrap();
    assert_eq!(guest.expect(Op::Data).1, b"answer");
    drop(client);
    assert_eq!(guest.expect(Op::Shutdown).0.flags, SHUTDOWN_BOTH);
    guest.send(ports, Op::Reset);
    guest.expect_silence();
}

#[test]
fn guest_that_stops_reading_makes_host_writes_fail() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    guest.send_shutdown(ports, SHUTDOWN_RECEIVE);
    guest.run();
    assert_eq!(client.write(b"x").unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    guest.send_data(ports, b"still here");
    guest.run();
    let mut heard = [0; 10];
    client.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"still here");
}

#[test]
fn host_that_closes_with_bytes_unread_by_the_guest_loses_none() {
    let mut guest = Guest::new();
    let (mut client, _) = guest.connected_client();
    client.write_all(&pattern(10_000)).unwrap();
    drop(client);
    guest.run();
    let mut heard = Vec::new();
    loop {
        let (header, payload) = guest.receive().unwrap();
        if header.op == Op::Shutdown as u16 {
            assert_eq!(header.flags, SHUTDOWN_BOTH);
            break;
        }
        heard.extend(payload);
    }
    assert!(heard == pattern(10_000));
}

#[test]
fn host_that_went_away_is_told_to_a_guest_that_writes() {
    let mut guest = Guest::new();
    let (client, ports) = guest.connected_client();
    client.shutdown(Shutdown::Read).unwrap();
    guest.send_data(ports, b"anyone?");
    assert_eq!(guest.expect(Op::Shutdown).0.flags, SHUTDOWN_RECEIVE);
    // Bytes that were already in flight are no error of the guest.
    guest.send_data(ports, b"anyone at all?");
    guest.expect_silence();
}

#[test]
fn host_bytes_beyond_the_guests_window_wait_for_credit() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    let sent = pattern(3 * GUEST_WINDOW as usize);
    let writer = thread::spawn({
        let sent = sent.clone();
        move || {
            client.write_all(&sent).unwrap();
            client
        }
    });
    let (mut heard, mut credited) = (Vec::new(), 0);
    guest.run_until(|guest| {
        while let Some((header, payload)) = guest.receive() {
            heard.extend(payload);
            assert!(
                heard.len() - credited <= GUEST_WINDOW as usize,
                "{} - {credited}",
                heard.len()
            );
            if header.op == Op::CreditRequest as u16 {
                credited = heard.len();
                guest.send_credit(ports, credited as u32);
            }
        }
        heard.len() == sent.len()
    });
    assert!(heard == sent);
    writer.join().unwrap();
}

#[test]
fn guest_bytes_for_a_slow_host_are_held_and_then_arrive_in_order() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    let sent = pattern(4 << 20);
    let reader = thread::spawn(move || read_rest(&mut client));
    let (mut at, mut forwarded, mut window) = (0, 0, 256 << 10);
    guest.run_until(|guest| {
        while let Some((header, _)) = guest.receive() {
            (forwarded, window) = (header.fwd_cnt as usize, header.buf_alloc as usize);
        }
        while at < sent.len() && at - forwarded < window {
            let len = (64 << 10).min(sent.len() - at).min(window - (at - forwarded));
            guest.send_data(ports, &sent[at..at + len]);
            at += len;
            guest.run();
        }
        at == sent.len()
    });
    guest.send_shutdown(ports, SHUTDOWN_BOTH);
    guest.run_until(|guest| {
        guest.receive().is_some_and(|(header, _)| header.op == Op::Reset as u16)
    });
    guest.run_until(|_| reader.is_finished());
    assert!(reader.join().unwrap() == sent);
}

#[test]
fn guest_that_asks_for_credit_is_told() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    guest.send_data(ports, b"12345");
    guest.send(ports, Op::CreditRequest);
    assert_eq!(guest.expect(Op::CreditUpdate).0.fwd_cnt, 5);
    let mut heard = [0; 5];
    client.read_exact(&mut heard).unwrap();
}

#[test]
fn packet_in_one_buffer_or_in_many_is_the_same() {
    let mut guest = Guest::new();
    let (mut client, ports) = guest.connected_client();
    let raw = [&guest.header(ports, Op::Data, 6).encode()[..], b"abcdef"].concat();
    for cuts in [vec![], vec![44], vec![1, 43], vec![20, 44, 45, 49], vec![47]] {
        let mut parts = Vec::new();
        let mut from = 0;
        for to in cuts.into_iter().chain([HEADER_LEN + 6]) {
            parts.push(Buffer::Readable(&raw[from..to]));
            from = to;
        }
        guest.driver.send(TX, &parts);
        guest.run();
        let mut heard = [0; 6];
        client.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"abcdef");
    }
}

#[test]
fn host_bytes_fill_receive_buffers_of_any_shape() {
    let mut guest = Guest::without_buffers(Limits::default());
    let sent = pattern(12_000);
    let mut client = guest.client([b"CONNECT 1024\n", &sent[..]].concat());
    // Only small pieces, more than one call can take.
    let shape = [Buffer::Writable(7), Buffer::Writable(40), Buffer::Writable(1)];
    let shape: Vec<Buffer> = shape.into_iter().cycle().take(30).collect();
    let mut offered = VecDeque::new();
    let (mut heard, mut ports) = (Vec::<u8>::new(), None);
    while heard.len() < sent.len() {
        while offered.len() < 8 {
            offered.push_back(guest.driver.send(RX, &shape));
        }
        guest.run();
        let used = guest.driver.used(RX).expect("nothing more comes");
        let packet = guest.driver.contents(&offered.pop_front().unwrap()).concat();
        let header = Header::decode(packet[..HEADER_LEN].try_into().unwrap());
        assert_eq!(used.len, HEADER_LEN as u32 + header.len);
        heard.extend(&packet[HEADER_LEN..used.len as usize]);
        ports.get_or_insert_with(|| {
            let ports = Ports { host: header.src_port, guest: 1024 };
            guest.send(ports, Op::Response);
            ports
        });
    }
    assert!(heard == sent);
    read_line(&mut client);
}

#[test]
fn many_connections_in_both_directions_keep_their_bytes_apart() {
    let mut guest = Guest::new();
    let listener = guest.listen(DIAL.host);
    let mut streams = Vec::new();
    for index in 0..50 {
        streams.push(guest.connected_client());
        let ports = Ports { guest: DIAL.guest + index, ..DIAL };
        streams.push((guest.connected_guest(&listener, ports), ports));
    }
    for (index, (stream, ports)) in streams.iter_mut().enumerate() {
        stream.write_all(&[index as u8; 3]).unwrap();
        guest.send_data(*ports, &[index as u8; 5]);
    }
    guest.run();
    let mut seen = 0;
    while let Some((header, payload)) = guest.receive() {
        let Header { src_port, dst_port, .. } = header;
        let index = streams.iter().position(|(_, p)| (p.host, p.guest) == (src_port, dst_port));
        assert_eq!(payload, [index.unwrap() as u8; 3]);
        seen += 1;
    }
    assert_eq!(seen, streams.len());
    for (index, (stream, _)) in streams.iter_mut().enumerate() {
        let mut heard = [0; 5];
        stream.read_exact(&mut heard).unwrap();
        assert_eq!(heard, [index as u8; 5]);
    }
}
