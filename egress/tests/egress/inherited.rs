//! Connections of the VM that the guest was copied from: they end in the guest, also those on which
//! it only waits.

use std::time::{Duration, Instant};

use super::fixture::{End, GUEST_IP, Guest, Upstream};
use super::syn;

/// The flags of a TCP segment, and its port in the guest.
fn segment(frame: &[u8]) -> (u8, u16) {
    assert_eq!(frame[23], 6, "TCP");
    (frame[47], u16::from_be_bytes([frame[36], frame[37]]))
}

const RST: u8 = 4;
const ACK: u8 = 16;

#[test]
fn inherited_connection_is_reset_until_the_guest_says_that_it_is_gone() {
    let flags = ["--allow", "all", "--inherited", "5000=1.1.1.1:443"];
    let mut guest = Guest::start(&flags);
    for _ in 0..3 {
        assert_eq!(segment(&guest.wait_frame().unwrap()), (ACK, 5000));
    }
    let inherited = guest.control(r#"{"connections": {}}"#);
    let expected = r#"{"connections":[{"destination":"1.1.1.1:443","guest_port":5000}]}"#;
    assert_eq!(inherited.to_string(), expected);
    // The guest's kernel answers with an acknowledgement of its own, and then again, as one that
    // lost the reset.
    for _ in 0..2 {
        guest.send_frame(&answer(ACK));
        let flags = std::iter::from_fn(|| guest.wait_frame()).map(|frame| segment(&frame).0);
        let mut after = flags.skip_while(|flags| *flags == ACK);
        assert_eq!([after.next(), after.next()], [Some(RST), Some(ACK)], "asked after the reset");
    }
    guest.send_frame(&answer(RST));
    let end = Instant::now() + Duration::from_secs(3);
    let mut after = 0;
    while Instant::now() < end {
        after += guest.receive_frame().iter().count();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(after <= 1, "{after} frames after the guest's reset, which may cross one probe");
    assert!(guest.denials().is_empty());
    assert_eq!(guest.control(r#"{"connections": {}}"#)["connections"].to_string(), "[]");
}

/// Returns a segment of the inherited connection.
fn answer(flags: u8) -> Vec<u8> {
    let mut answer = syn(GUEST_IP, "1.1.1.1:443".parse().unwrap(), 5000);
    (answer[45], answer[47]) = (9, flags);
    super::fill_tcp_checksum(&mut answer);
    answer
}

#[test]
fn inherited_connection_that_the_guest_opens_anew_is_left_alone() {
    let upstream = Upstream::start(b"page");
    // The guest's first port, so that its own connection has the same two ends.
    let inherited = format!("40001={}", upstream.address);
    let mut guest = Guest::start(&["--allow", "127.0.0.0/8", "--inherited", &inherited]);
    assert!(guest.wait_frame().is_some());
    let handle = guest.connect(upstream.address);
    assert!(guest.is_accepted(handle));
    let open = guest.control(r#"{"connections": {}}"#)["connections"].clone();
    assert_eq!(open.as_array().unwrap().len(), 1, "{open}");
    assert_eq!(open[0]["guest_port"], 40_001);
    assert_eq!(guest.talk(handle, b"x"), End::Closed(b"page".to_vec()));
}

#[test]
fn guest_without_a_stack_is_asked_for_many_connections_without_harm() {
    let inherited: Vec<_> = (1..=600).map(|port| format!("{port}=1.1.1.1:443")).collect();
    let mut flags = vec!["--allow", "all"];
    inherited.iter().for_each(|key| flags.extend(["--inherited", key]));
    let mut guest = Guest::start(&flags);
    // Nothing is read for a while, as by a guest that does not run yet.
    std::thread::sleep(Duration::from_secs(2));
    let mut ports = std::collections::BTreeSet::new();
    while let Some(frame) = guest.receive_frame() {
        ports.insert(segment(&frame).1);
    }
    assert_eq!(ports.len(), 512);
    assert_eq!(
        guest.control(r#"{"connections": {}}"#)["connections"].as_array().unwrap().len(),
        512
    );
    assert!(guest.is_alive() && guest.gateway_memory_kib() < 64 << 10);
}
