//! The metadata service from the guest's end, over a link that may lose frames.

use std::time::Duration;

use proptest::prelude::*;

use super::packet::{self, Frame, Segment, flag};
use super::testing::{Bench, Client, GUEST_MAC};
use super::*;

fn bench() -> Bench {
    Bench::new(MmdsConfig::default())
}

fn ask(bench: &mut Bench, port: u16, request: &str) -> String {
    let mut client = Client::new(port, 77);
    client.ask(bench, request.as_bytes(), &mut || false);
    String::from_utf8(client.received).unwrap()
}

fn said(bench: &mut Bench) -> Vec<(u8, u32, Vec<u8>)> {
    let read = |frame: Vec<u8>| match packet::parse(&frame) {
        Some(Frame::Tcp(Segment { flags, ack, payload, .. })) => (flags, ack, payload.to_vec()),
        other => panic!("{other:?}"),
    };
    bench.frames().into_iter().map(read).collect()
}

#[test]
fn arp_request_is_answered_with_the_address_of_the_service() {
    let mut bench = bench();
    let mut request = vec![0xff; 6];
    request.extend(GUEST_MAC);
    request.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    request.extend(GUEST_MAC);
    request.extend([10, 0, 0, 2, 0, 0, 0, 0, 0, 0, 169, 254, 169, 254]);
    let ethernet = request[..14].try_into().unwrap();
    assert!(bench.mmds.is_for_us(&ethernet, &request[14..]));
    assert!(bench.mmds.receive(&request, bench.now));
    let [reply] = &bench.frames()[..] else { panic!() };
    assert_eq!(reply[20..22], [0, 2]);
    assert_eq!(reply[22..28], packet::SERVICE_MAC);
    assert_eq!(reply[28..32], [169, 254, 169, 254]);
    // Requests for other addresses are not for the service.
    request[38..42].copy_from_slice(&[10, 0, 0, 1]);
    assert!(!bench.mmds.is_for_us(&ethernet, &request[14..]));
}

#[test]
fn long_answer_comes_in_segments_and_keeps_to_the_window() {
    let mut bench = bench();
    let text = ask(&mut bench, 4000, "GET /long HTTP/1.1\r\n\r\n");
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{}", &text[..100]);
    assert!(text.ends_with(&"x".repeat(20_000)));
}

#[test]
fn connection_serves_one_request_after_another_and_then_closes() {
    let mut bench = bench();
    let mut client = Client::new(4000, 5);
    for _ in 0..3 {
        client.received.clear();
        client.ask(&mut bench, b"GET /id HTTP/1.1\r\n\r\n", &mut || false);
        assert!(client.received.ends_with(b"i-1") && !client.closed);
    }
    client.received.clear();
    client.ask(&mut bench, b"GET /id HTTP/1.0\r\n\r\n", &mut || false);
    // The service's FIN follows the response; the client's ends the connection.
    bench.mmds.receive(&client.frame(flag::ACK, &[], 1000), bench.now);
    bench.frames();
    let mut done = client.frame(flag::ACK | flag::FIN, &[], 1000);
    // Everything up to and including the service's FIN.
    let ack = u32::from_be_bytes(done[42..46].try_into().unwrap());
    let ack = if client.closed { ack } else { ack.wrapping_add(1) };
    done[42..46].copy_from_slice(&ack.to_be_bytes());
    bench.mmds.receive(&done, bench.now);
    assert_eq!(said(&mut bench).len(), 1);
    bench.frames();
    assert!(bench.mmds.connections.is_empty());
}

#[test]
fn segment_of_no_connection_is_reset_and_so_is_another_port() {
    let mut bench = bench();
    let stray = Client::new(4000, 9);
    bench.mmds.receive(&stray.frame(flag::ACK, b"hello", 100), bench.now);
    assert_eq!(said(&mut bench), [(flag::RST, 0, vec![])]);
    let mut syn = stray.frame(flag::SYN, &[], 100);
    syn[36..38].copy_from_slice(&81u16.to_be_bytes());
    bench.mmds.receive(&syn, bench.now);
    assert_eq!(said(&mut bench), [(flag::RST | flag::ACK, 10, vec![])]);
    bench.mmds.receive(&stray.frame(flag::RST, &[], 100), bench.now);
    assert_eq!(said(&mut bench), []);
}

#[test]
fn flood_of_connections_leaves_room_for_the_next() {
    let mut bench = bench();
    for port in 0..2000 {
        bench.mmds.receive(&Client::new(port, 1).frame(flag::SYN, &[], 100), bench.now);
        bench.now += Duration::from_micros(1);
    }
    assert_eq!(bench.mmds.connections.len(), CONNECTIONS_MAX);
    bench.frames();
    assert!(ask(&mut bench, 5000, "GET /id HTTP/1.1\r\n\r\n").ends_with("i-1"));
}

#[test]
fn quiet_connection_and_one_that_never_acknowledges_are_given_up() {
    let mut bench = bench();
    ask(&mut bench, 4000, "GET /id HTTP/1.1\r\n\r\n");
    bench.mmds.receive(&Client::new(4001, 1).frame(flag::SYN, &[], 100), bench.now);
    let mut sent = 0;
    for _ in 0..100 {
        sent += bench.frames().len();
        bench.now += Duration::from_secs(1);
    }
    assert!(bench.mmds.connections.is_empty());
    assert!(sent < 30, "{sent}");
}

#[test]
fn request_longer_than_there_is_room_is_refused() {
    let mut bench = bench();
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(2 * RECEIVE_MAX));
    assert!(ask(&mut bench, 4000, &long).starts_with("HTTP/1.1 400 Bad Request"));
}

#[test]
fn connection_from_before_a_reset_of_the_card_is_told_so() {
    let mut bench = bench();
    let mut client = Client::new(4000, 5);
    client.ask(&mut bench, b"GET /id HTTP/1.1\r\n\r\n", &mut || false);
    bench.mmds.reset();
    client.received.clear();
    client.ask(&mut bench, b"GET /id HTTP/1.1\r\n\r\n", &mut || false);
    assert!(client.reset);
}

proptest! {
    #[test]
    fn whatever_is_lost_the_answer_arrives_whole(
        losses in prop::collection::vec(any::<bool>(), 0..60), iss in any::<u32>(), long in any::<bool>(),
    ) {
        let mut bench = bench();
        let mut client = Client::new(4000, iss);
        let mut losses = losses.into_iter();
        let path = if long { "long" } else { "id" };
        let request = format!("GET /{path} HTTP/1.1\r\n\r\n");
        client.ask(&mut bench, request.as_bytes(), &mut || losses.next().unwrap_or(false));
        prop_assert!(!client.reset);
        let expected = if long { "x".repeat(20_000) } else { "i-1".to_owned() };
        prop_assert!(String::from_utf8(client.received).unwrap().ends_with(&expected));
    }

    #[test]
    fn any_walk_leaves_a_service_that_answers(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        testing::walk(&bytes);
    }
}
