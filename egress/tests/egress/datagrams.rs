//! Datagrams over UDP: those that a rule allows are carried both ways, others are refused at once
//! and reach nobody.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::time::Duration;

use super::fixture::{DnsServer, Guest, UdpServer};
use super::{fill_ip_checksum, udp, udp_from};

const LOOPBACK: &[&str] = &["--allow", "127.0.0.0/8"];
/// Types and codes of ICMP: the gateway prohibits it; nobody listens at the port.
const PROHIBITED: [u8; 2] = [3, 13];
const PORT_UNREACHABLE: [u8; 2] = [3, 3];

/// Sends a datagram and returns what comes back.
fn exchange(guest: &mut Guest, to: SocketAddrV4, payload: &[u8]) -> Option<Vec<u8>> {
    let handle = guest.bind_udp();
    guest.send_udp(handle, to, payload);
    let (from, answer) = guest.receive_udp(handle)?;
    assert_eq!(from, to);
    Some(answer)
}

/// Sends a datagram and returns the type and code of the ICMP message that answers it.
fn refusal(guest: &Guest, to: Ipv4Addr, port: u16) -> [u8; 2] {
    guest.send_frame(&udp(to, port));
    let answer = guest.wait_frame().unwrap();
    assert_eq!(answer[23], 1, "ICMP");
    // The message repeats the ends of the datagram, by which the guest finds its socket.
    assert_eq!((&answer[58..62], &answer[62..64]), (&to.octets()[..], &[0x13, 0x88][..]));
    assert_eq!(answer[64..66], port.to_be_bytes());
    [answer[34], answer[35]]
}

#[test]
fn datagram_that_a_rule_allows_is_answered_and_counted() {
    let server = UdpServer::start();
    let rule = format!("127.0.0.1/32:{}/udp", server.address.port());
    let mut guest = Guest::start(&["--allow", &rule]);
    assert_eq!(exchange(&mut guest, server.address, b"ping").unwrap(), b"ping");
    assert_eq!(server.heard(), [b"ping"]);
    let status = guest.status();
    let used = &status["rules"][0];
    assert_eq!((&used["rule"], &used["connections"]), (&rule.into(), &1.into()));
    assert_eq!((&used["bytes_out"], &used["bytes_in"]), (&4.into(), &4.into()));
    assert_eq!(status["open_associations"], 1);
    assert!(guest.log().contains(r#""protocol":"udp""#));
}

#[test]
fn longest_datagram_arrives_whole_in_both_directions() {
    let server = UdpServer::start();
    let mut guest = Guest::start(LOOPBACK);
    let payload: Vec<u8> = (0..1472).map(|at| (at % 251) as u8).collect();
    assert_eq!(exchange(&mut guest, server.address, &payload).unwrap(), payload);
    assert_eq!(exchange(&mut guest, server.address, b"").unwrap(), b"");
}

#[test]
fn datagram_without_a_rule_is_refused_at_once_and_not_sent() {
    let server = UdpServer::start();
    let port = server.address.port();
    // A rule with a port is for TCP unless it says otherwise.
    let mut guest = Guest::start(&["--allow", &format!("127.0.0.1:{port}")]);
    assert_eq!(refusal(&guest, *server.address.ip(), port), PROHIBITED);
    assert_eq!(refusal(&guest, Ipv4Addr::new(1, 1, 1, 1), 123), PROHIBITED);
    assert_eq!(refusal(&guest, Ipv4Addr::new(10, 0, 2, 1), 123), PROHIBITED);
    assert_eq!(guest.denials(), ["protocol", "no-rule", "protocol"]);
    let status = guest.status();
    assert_eq!(status["denied"][0]["protocol"], "udp");
    assert_eq!(
        (&status["denied"][0]["port"], status["open_associations"].as_u64()),
        (&port.into(), Some(0))
    );
    assert!(server.heard().is_empty());
}

#[test]
fn d8_metadata_private_and_loopback_stay_closed_to_datagrams_with_allow_all() {
    let server = UdpServer::start();
    let mut guest = Guest::start(&["--allow", "all"]);
    for to in [
        [169, 254, 169, 254],
        [168, 63, 129, 16],
        [10, 0, 0, 1],
        [172, 16, 0, 1],
        [192, 168, 1, 1],
        [100, 64, 0, 1],
        [224, 0, 0, 251],
        [255, 255, 255, 255],
        server.address.ip().octets(),
    ] {
        assert_eq!(refusal(&guest, to.into(), server.address.port()), PROHIBITED, "{to:?}");
    }
    assert!(guest.denials().iter().all(|reason| reason == "special-range"));
    assert!(server.heard().is_empty());
}

#[test]
fn d9_address_of_the_host_is_closed_to_datagrams_under_a_rule_for_its_network() {
    // A datagram socket that is connected tells the host's address, and sends nothing.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let Ok(SocketAddr::V4(own)) = socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr())
    else {
        // A host without a network has no address but loopback.
        return;
    };
    let server = UdpServer::start_at(&format!("{}:0", own.ip()));
    let [a, b, c, _] = own.ip().octets();
    let mut guest = Guest::start(&["--allow", &format!("{a}.{b}.{c}.0/24")]);
    assert_eq!(refusal(&guest, *own.ip(), server.address.port()), PROHIBITED);
    assert_eq!(guest.denials(), ["own-address"]);
    assert!(server.heard().is_empty());
    assert_eq!(guest.control(&format!(r#"{{"allow": "{}"}}"#, own.ip()))["ok"], true);
    assert_eq!(exchange(&mut guest, server.address, b"ping").unwrap(), b"ping");
}

#[test]
fn name_that_a_rule_allows_over_udp_is_reached() {
    let server = UdpServer::start();
    let dns = DnsServer::start(&[("ntp.example", "127.0.0.1"), ("web.example", "127.0.0.2")]);
    let rule = format!("ntp.example:{}/udp", server.address.port());
    let flags = ["--allow-host", &rule, "--allow-host", "web.example"];
    let flags = [&flags[..], &["--names-into", "127.0.0.0/8"]].concat();
    let mut guest = Guest::start_with_dns(&dns, &flags);
    // Before the name was asked for, nothing leads to the address.
    assert_eq!(refusal(&guest, *server.address.ip(), server.address.port()), PROHIBITED);
    guest.resolve("ntp.example.").unwrap();
    assert_eq!(exchange(&mut guest, server.address, b"ping").unwrap(), b"ping");
    assert_eq!(guest.status()["rules"][0]["rule"], rule);
    assert!(guest.log().contains(r#""name":"ntp.example","address":"127.0.0.1""#));
}

#[test]
fn quic_is_denied_where_rules_are_by_name() {
    let dns = DnsServer::start(&[("web.example", "127.0.0.2")]);
    let flags = ["--allow-host", "web.example", "--names-into", "127.0.0.0/8"];
    let mut guest = Guest::start_with_dns(&dns, &flags);
    guest.resolve("web.example.").unwrap();
    guest.drain();
    let web = Ipv4Addr::new(127, 0, 0, 2);
    assert_eq!([refusal(&guest, web, 443), refusal(&guest, web, 53)], [PROHIBITED; 2]);
    assert_eq!(guest.denials(), ["quic", "protocol"]);
    // A name that is denied could hide behind an address that is allowed.
    guest.control(r#"{"set": {"allow": ["127.0.0.0/8"], "deny": ["evil.example"]}}"#);
    assert_eq!(refusal(&guest, web, 443), PROHIBITED);
    let last = guest.status()["denied"][1].clone();
    assert_eq!((&last["reason"], &last["count"]), (&"quic".into(), &2.into()));
}

#[test]
fn answer_of_another_sender_never_arrives() {
    let (server, other) = (UdpServer::start(), UdpServer::start());
    let mut guest = Guest::start(LOOPBACK);
    let handle = guest.bind_udp();
    guest.send_udp(handle, server.address, b"ping");
    assert_eq!(guest.receive_udp(handle), Some((server.address, b"ping".to_vec())));
    other.send(b"forged", server.peer());
    server.send(b"true", server.peer());
    assert_eq!(guest.receive_udp(handle), Some((server.address, b"true".to_vec())));
    assert_eq!(guest.status()["totals"]["bytes_in"], 8);
}

#[test]
fn policy_that_changes_ends_the_associations_that_it_denies() {
    let (stays, goes) = (UdpServer::start(), UdpServer::start());
    let mut guest = Guest::start(LOOPBACK);
    let handles = [guest.bind_udp(), guest.bind_udp()];
    for (handle, server) in handles.into_iter().zip([&stays, &goes]) {
        guest.send_udp(handle, server.address, b"ping");
        guest.receive_udp(handle).unwrap();
    }
    let rule = format!("127.0.0.1/32:{}/udp", stays.address.port());
    guest.control(&format!(r#"{{"set": {{"allow": ["{rule}"]}}}}"#));
    assert_eq!((guest.status()["open_associations"].as_u64(), guest.denials().len()), (Some(1), 1));
    let told = guest.wait_frame().unwrap();
    assert_eq!((told[23], [told[34], told[35]]), (1, PROHIBITED));
    goes.send(b"late", goes.peer());
    stays.send(b"more", stays.peer());
    assert_eq!(guest.receive_udp(handles[0]), Some((stays.address, b"more".to_vec())));
    guest.send_udp(handles[1], goes.address, b"again");
    assert_eq!(
        guest.until(|guest| (guest.status()["totals"]["denied"] == 2).then_some(())),
        Some(())
    );
    assert_eq!((goes.heard().len(), stays.heard().len()), (1, 1));
    assert_eq!(guest.status()["rules"][0]["bytes_in"], 4);
}

#[test]
fn port_where_nobody_listens_is_told_to_the_guest() {
    let closed = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut guest = Guest::start(LOOPBACK);
    assert_eq!(refusal(&guest, Ipv4Addr::LOCALHOST, closed), PORT_UNREACHABLE);
    assert!(guest.denials().is_empty());
}

#[test]
fn d16_associations_have_a_bound_and_honest_ones_work_after_it() {
    let server = UdpServer::start();
    let mut guest = Guest::start(LOOPBACK);
    for port in 1..=2000 {
        guest.send_frame(&udp_from(port, *server.address.ip(), server.address.port()));
        guest.drain();
    }
    let refused =
        guest.until(|guest| (guest.status()["denied"][0]["reason"] == "too-many").then_some(()));
    assert_eq!((refused, guest.status()["open_associations"].as_u64()), (Some(()), Some(256)));
    assert!(server.heard().len() < 1000, "as many sockets as datagrams");
    // The rate allows the next.
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(exchange(&mut guest, server.address, b"ping").unwrap(), b"ping");
}

#[test]
fn d16_datagram_with_a_wrong_length_or_checksum_reaches_nobody() {
    let server = UdpServer::start();
    let mut guest = Guest::start(LOOPBACK);
    let good = udp(*server.address.ip(), server.address.port());
    // The length, in its lower and upper byte, the checksum, and a fragment.
    for (at, value) in [(39, 7), (39, 13), (38, 1), (41, 1), (20, 0x20)] {
        let mut frame = good.clone();
        frame[at] = value;
        fill_ip_checksum(&mut frame);
        guest.send_frame(&frame);
    }
    guest.send_frame(&good);
    assert_eq!(guest.until(|_| (!server.heard().is_empty()).then_some(())), Some(()));
    assert_eq!(server.heard(), [b"quic"]);
    let dropped = guest.status()["dropped"].clone();
    assert_eq!((&dropped["malformed"], &dropped["fragment"]), (&4.into(), &1.into()));
}

#[test]
fn guest_that_takes_no_datagrams_costs_no_processor_time() {
    let server = UdpServer::start();
    let mut guest = Guest::start(LOOPBACK);
    assert_eq!(exchange(&mut guest, server.address, b"ping").unwrap(), b"ping");
    // More than the link and the sockets hold.
    for _ in 0..5000 {
        server.send(&[7; 1400], server.peer());
    }
    std::thread::sleep(Duration::from_millis(500));
    let before = guest.gateway_ticks();
    std::thread::sleep(Duration::from_secs(1));
    let ticks = guest.gateway_ticks() - before;
    assert!(ticks < 10, "{ticks} hundredths of a second");
    assert!(guest.gateway_memory_kib() < 64 << 10);
    guest.drain();
    assert_eq!(exchange(&mut guest, server.address, b"pong").unwrap(), b"pong");
}
