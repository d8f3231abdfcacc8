//! Frames that an honest guest does not send: nothing arrives, and the gateway lives.

use std::net::Ipv4Addr;

use super::fixture::{End, GATEWAY_MAC, GUEST_IP, GUEST_MAC, Guest, Upstream};
use super::{syn, udp};

const FLOOD: u32 = 100_000;

fn dropped(guest: &mut Guest, why: &str) -> u64 {
    guest.until(|guest| guest.status()["dropped"][why].as_u64()).unwrap_or(0)
}

#[test]
fn d6_spoofed_addresses_are_dropped_and_counted() {
    let upstream = Upstream::start(b"secret");
    let mut guest = Guest::start(&["--allow", "127.0.0.0/8"]);
    let mut other_mac = syn(GUEST_IP, upstream.address, 1);
    other_mac[11] ^= 1;
    guest.send_frame(&other_mac);
    guest.send_frame(&syn(Ipv4Addr::new(10, 0, 2, 16), upstream.address, 2));
    assert_eq!(guest.until(|guest| (dropped(guest, "spoofed") == 2).then_some(())), Some(()));
    assert_eq!(guest.receive_frame(), None, "a spoofed frame was answered");
    assert_eq!(guest.status()["open_connections"], 0);
    // The honest twin of these frames is accepted.
    guest.send_frame(&syn(GUEST_IP, upstream.address, 3));
    assert!(guest.wait_frame().is_some());
}

#[test]
fn d6_tagged_frames_are_dropped() {
    let upstream = Upstream::start(b"secret");
    let mut guest = Guest::start(&["--allow", "127.0.0.0/8"]);
    let frame = syn(GUEST_IP, upstream.address, 1);
    for tag in [[0x81, 0, 0, 5], [0x88, 0xa8, 0, 5]] {
        guest.send_frame(&[&frame[..12], &tag, &frame[12..]].concat());
    }
    assert_eq!(guest.until(|guest| (dropped(guest, "tagged") == 2).then_some(())), Some(()));
    assert_eq!(guest.receive_frame(), None);
}

#[test]
fn d7_ipv6_and_fragments_are_dropped() {
    let upstream = Upstream::start(b"secret");
    let mut guest = Guest::start(&["--allow", "127.0.0.0/8"]);
    let mut six = [&GATEWAY_MAC[..], &GUEST_MAC, &[0x86, 0xdd]].concat();
    six.resize(80, 0x60);
    guest.send_frame(&six);
    assert_eq!(dropped(&mut guest, "ipv6"), 1);
    let mut fragment = syn(GUEST_IP, upstream.address, 1);
    fragment[20] = 0x20;
    super::fill_ip_checksum(&mut fragment);
    guest.send_frame(&fragment);
    assert_eq!(dropped(&mut guest, "fragment"), 1);
    assert_eq!(guest.receive_frame(), None);
}

#[test]
fn d10_dns_to_another_server_is_refused() {
    let mut guest = Guest::start(&["--allow-host", "good.example"]);
    guest.send_frame(&udp(Ipv4Addr::new(8, 8, 8, 8), 53));
    guest.wait_frame().unwrap();
    assert_eq!(guest.denials(), ["no-rule"]);
}

#[test]
fn segment_of_an_unknown_connection_is_reset() {
    // A restored guest has connections that a new gateway never saw.
    let mut guest = Guest::start(&["--allow", "all"]);
    let mut frame = syn(GUEST_IP, "1.1.1.1:443".parse().unwrap(), 5000);
    (frame[45], frame[47]) = (9, 0x10);
    super::fill_tcp_checksum(&mut frame);
    guest.send_frame(&frame);
    let reset = guest.wait_frame().unwrap();
    assert_eq!((reset[23], reset[47], reset[41]), (6, 4, 9), "TCP, RST, at the number expected");
    assert!(guest.denials().is_empty());
}

#[test]
fn message_of_a_wrong_length_is_dropped() {
    let mut guest = Guest::start(&["--allow", "all"]);
    guest.send_message(&[0; 5]);
    guest.send_message(&[0; 12]);
    guest.send_message(&[0; 4000]);
    let mut offload = syn(GUEST_IP, "1.1.1.1:80".parse().unwrap(), 1);
    offload.splice(..0, [1; 12]);
    guest.send_message(&offload);
    assert_eq!(guest.until(|guest| (dropped(guest, "malformed") == 4).then_some(())), Some(()));
    assert!(guest.is_alive());
}

#[test]
fn flood_of_hostile_frames_reaches_nobody_and_ends_nothing() {
    let upstream = Upstream::start(b"secret");
    let mut guest = Guest::start(&["--allow-host", "good.example", "--allow", "127.0.0.9/32"]);
    guest.status();
    let before = guest.gateway_memory_kib();
    let mut random = 0x1234_5678_u32;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        random
    };
    for number in 0..FLOOD {
        let port = (number % 60_000 + 1) as u16;
        let mut frame = match number % 5 {
            0 => syn(GUEST_IP, upstream.address, port),
            1 => udp(Ipv4Addr::from_bits(next()), port),
            2 => syn(GUEST_IP, std::net::SocketAddrV4::new(Ipv4Addr::from_bits(next()), port), 7),
            _ => syn(GUEST_IP, "127.0.0.9:1".parse().unwrap(), port),
        };
        if number % 5 >= 3 {
            // Random bytes anywhere, with and without a right checksum.
            for _ in 0..1 + next() % 8 {
                let at = next() as usize % frame.len();
                frame[at] = next() as u8;
            }
            frame.truncate(frame.len() - next() as usize % 20);
            if number % 2 == 0 && frame.len() >= 34 {
                super::fill_ip_checksum(&mut frame);
            }
        }
        guest.send_frame(&frame);
        if number % 64 == 0 {
            guest.drain();
        }
    }
    let frames = guest.until(|guest| {
        guest.drain();
        let frames = guest.status()["totals"]["frames_in"].as_u64();
        frames.filter(|frames| *frames >= u64::from(FLOOD))
    });
    assert!(frames.is_some(), "the gateway stands still");
    assert!(upstream.heard().is_empty(), "a denied connection arrived");
    println!("egress: {FLOOD} hostile frames tried, none arrived");
    assert!(guest.is_alive());
    let status = guest.status();
    assert_eq!(status["denied"].as_array().unwrap().len(), 100);
    assert!(status["totals"]["denied"].as_u64() > Some(u64::from(FLOOD) / 5), "{status}");
    let after = guest.gateway_memory_kib();
    assert!(after < before + (64 << 10), "{before} KiB became {after} KiB");
    assert!(guest.log().lines().count() < 20_000);
}

#[test]
fn connections_have_a_bound_and_honest_ones_work_after_it() {
    let upstream = Upstream::silent();
    let mut guest = Guest::start(&["--allow", "127.0.0.0/8"]);
    for port in 1..=400 {
        guest.send_frame(&syn(GUEST_IP, upstream.address, port));
        guest.drain();
    }
    let status = guest.status();
    assert!(status["open_connections"].as_u64().unwrap() <= 64, "{status}");
    assert_eq!(status["denied"][0]["reason"], "too-many");
    assert!(upstream.heard().is_empty(), "a handshake without an end was dialled");
    // The guest's stack now resets what it did not ask for.
    let room = guest.until(|guest| {
        guest.drain();
        (guest.status()["open_connections"] == 0).then_some(())
    });
    assert_eq!(room, Some(()));
    let greeting = Upstream::greeting(b"hello");
    assert_eq!(guest.exchange(greeting.address, b""), End::Closed(b"hello".to_vec()));
}

#[test]
fn changed_segments_of_a_live_connection_end_nothing() {
    let upstream = Upstream::silent();
    let mut guest = Guest::start(&["--allow", "127.0.0.0/8"]);
    let handle = guest.connect(upstream.address);
    assert!(guest.is_accepted(handle));
    let local = guest.socket(handle).local_endpoint().unwrap().port;
    let mut random = 99_u32;
    for _ in 0..20_000 {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let mut frame = syn(GUEST_IP, upstream.address, local);
        // Sequence and acknowledgement numbers, flags without RST, window, and an option.
        frame[38..42].copy_from_slice(&random.to_be_bytes());
        frame[42..46].copy_from_slice(&random.rotate_left(7).to_be_bytes());
        frame[47] = (random >> 24) as u8 & !4;
        frame[48..50].copy_from_slice(&(random as u16).to_be_bytes());
        super::fill_tcp_checksum(&mut frame);
        guest.send_frame(&frame);
        guest.drain();
    }
    guest.drain();
    assert!(guest.is_alive());
    let other = Upstream::greeting(b"hello");
    assert_eq!(guest.exchange(other.address, b""), End::Closed(b"hello".to_vec()));
}
