//! Traffic that no rule allows is refused at once, is recorded, and reaches nobody.

use std::net::{SocketAddr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;

use super::fixture::{DnsServer, End, Guest, Upstream};
use super::{encrypted_hello, http, tls_hello};

const AT_ONCE: Duration = Duration::from_secs(1);

fn address(text: &str) -> SocketAddrV4 {
    text.parse().unwrap()
}

/// Checks that a connection is reset within a second.
fn refused(guest: &mut Guest, to: SocketAddrV4, bytes: &[u8]) {
    let begin = Instant::now();
    assert_eq!(guest.exchange(to, bytes), End::Reset, "{to}");
    assert!(begin.elapsed() < AT_ONCE, "{to} took {:?}", begin.elapsed());
}

#[test]
fn d10_name_without_a_rule_is_refused_and_not_asked_for() {
    let dns = DnsServer::start(&[("evil.example", "127.0.0.1")]);
    let mut guest = Guest::start_with_dns(&dns, &["--allow-host", "good.example"]);
    let begin = Instant::now();
    assert_eq!(guest.resolve("evil.example."), Err(ResponseCode::Refused));
    assert_eq!(guest.resolve("good.example.evil.example."), Err(ResponseCode::Refused));
    assert!(begin.elapsed() < AT_ONCE);
    assert!(dns.asked().is_empty(), "a refused name left the host");
    let status = guest.status();
    assert_eq!(status["denied"][0]["name"], "evil.example");
    assert_eq!(status["denied"][0]["reason"], "name-not-allowed");
    assert!(guest.log().contains(r#""name":"evil.example""#));
}

#[test]
fn rules_by_address_resolve_no_name() {
    let dns = DnsServer::start(&[("a.example", "127.0.0.1")]);
    let mut guest = Guest::start_with_dns(&dns, &["--allow", "127.0.0.0/8"]);
    assert_eq!(guest.resolve("a.example."), Err(ResponseCode::Refused));
    assert!(dns.asked().is_empty());
}

#[test]
fn address_without_a_rule_is_reset_at_once() {
    let upstream = Upstream::start(b"secret");
    let mut guest = Guest::start(&["--allow-host", "good.example", "--allow", "127.0.0.1/32:1"]);
    refused(&mut guest, upstream.address, b"x");
    refused(&mut guest, address("1.1.1.1:443"), &tls_hello("good.example"));
    assert!(upstream.heard().is_empty());
    assert_eq!(guest.denials(), ["special-range", "no-rule"]);
}

#[test]
fn d8_metadata_private_and_loopback_stay_closed_with_allow_all() {
    let upstream = Upstream::start(b"secret");
    let mut guest = Guest::start(&["--allow", "all"]);
    for to in [
        "169.254.169.254:80",
        "168.63.129.16:80",
        "10.0.0.1:80",
        "10.0.2.1:80",
        "172.16.0.1:80",
        "192.168.1.1:80",
        "100.64.0.1:80",
        "198.18.0.1:80",
        "240.0.0.1:80",
    ] {
        refused(&mut guest, address(to), b"GET / HTTP/1.0\r\n\r\n");
    }
    refused(&mut guest, upstream.address, b"x");
    assert!(upstream.heard().is_empty());
}

#[test]
fn d9_address_of_the_host_is_closed_to_a_rule_for_its_network() {
    // A datagram socket that is connected tells the host's address, and sends nothing.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let Ok(SocketAddr::V4(own)) = socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr())
    else {
        // A host without a network has no address but loopback.
        return;
    };
    let upstream = Upstream::start_at(&format!("{}:0", own.ip()), b"secret");
    let [a, b, c, _] = own.ip().octets();
    let mut guest = Guest::start(&["--allow", &format!("{a}.{b}.{c}.0/24")]);
    refused(&mut guest, upstream.address, b"x");
    assert!(upstream.heard().is_empty());
    assert_eq!(guest.denials(), ["own-address"]);
    assert_eq!(guest.control(&format!(r#"{{"allow": "{}"}}"#, own.ip()))["ok"], true);
    assert_eq!(guest.exchange(upstream.address, b"x"), End::Closed(b"secret".to_vec()));
}

#[test]
fn rebinding_name_that_leads_to_a_closed_range_is_refused() {
    let upstream = Upstream::start(b"secret");
    let table = [("a.example", "169.254.169.254"), ("b.example", "127.0.0.1")];
    let dns = DnsServer::start(&table);
    for flags in [["--allow", "all"], ["--allow-host", "*.example.net"]] {
        let mut guest = Guest::start_with_dns(
            &dns,
            &[&flags[..], &["--allow-host", "a.example", "--allow-host", "b.example"]].concat(),
        );
        for name in ["a.example.", "b.example."] {
            assert_eq!(guest.resolve(name), Err(ResponseCode::Refused), "{name}");
        }
        assert_eq!(guest.denials(), ["special-range", "special-range"]);
        refused(&mut guest, upstream.address, &http("b.example"));
        refused(&mut guest, address("169.254.169.254:80"), &http("a.example"));
    }
    assert!(upstream.heard().is_empty());
}

#[test]
fn rebinding_answer_with_one_closed_address_keeps_the_others() {
    let dns = DnsServer::start(&[("a.example", "127.0.0.1 93.184.216.34 10.0.0.1")]);
    let mut guest = Guest::start_with_dns(&dns, &["--allow-host", "a.example"]);
    let addresses = guest.resolve("a.example.").unwrap();
    assert_eq!(addresses, ["93.184.216.34".parse::<std::net::Ipv4Addr>().unwrap()]);
}

#[test]
fn rebinding_after_the_first_answer_is_denied_at_the_second() {
    let dns = DnsServer::start(&[("a.example", "127.0.0.1")]);
    let upstream = Upstream::start(b"secret");
    let flags = ["--allow-host", "a.example", "--names-into", "127.0.0.1/32"];
    let mut guest = Guest::start_with_dns(&dns, &flags);
    guest.resolve("a.example.").unwrap();
    // The range is closed again: the cached answer no longer helps.
    let set = guest.control(r#"{"set": {"allow_host": ["a.example"]}}"#);
    assert_eq!(set["ok"], true);
    refused(&mut guest, upstream.address, &http("a.example"));
    assert!(upstream.heard().is_empty());
}

#[test]
fn rebinding_address_that_was_closed_since_is_not_dialled_in_place_of_an_open_one() {
    let dns = DnsServer::start(&[("a.example", "127.0.0.2 127.0.0.1")]);
    let upstream = Upstream::start(b"secret");
    let flags = ["--allow-host", "a.example", "--names-into", "127.0.0.0/8"];
    let mut guest = Guest::start_with_dns(&dns, &flags);
    guest.resolve("a.example.").unwrap();
    let narrower = r#"{"set": {"allow_host": ["a.example"], "names_into": ["127.0.0.2/32"]}}"#;
    assert_eq!(guest.control(narrower)["ok"], true);
    // Nobody listens there, so the next address of the name has its turn.
    let open = SocketAddrV4::new([127, 0, 0, 2].into(), upstream.address.port());
    refused(&mut guest, open, &http("a.example"));
    assert!(upstream.heard().is_empty());
    assert_eq!(guest.denials(), ["special-range"]);
}

#[test]
fn shown_name_without_a_rule_is_reset_before_a_byte_arrives() {
    let upstream = Upstream::start(b"secret");
    let dns = DnsServer::start(&[("good.example", "127.0.0.1")]);
    let flags = ["--allow-host", "good.example", "--names-into", "127.0.0.0/8"];
    let mut guest = Guest::start_with_dns(&dns, &flags);
    guest.resolve("good.example.").unwrap();
    for bytes in [tls_hello("evil.example"), http("evil.example")] {
        refused(&mut guest, upstream.address, &bytes);
    }
    for bytes in [tls_hello("127.0.0.1"), encrypted_hello("good.example")] {
        refused(&mut guest, upstream.address, &bytes);
    }
    assert!(upstream.heard().iter().all(Vec::is_empty), "bytes of a denied connection arrived");
    assert_eq!(guest.denials(), ["name-not-allowed", "no-name", "encrypted-hello"]);
    let status = guest.status();
    let first = &status["denied"][0];
    assert_eq!((&first["name"], &first["count"]), (&"evil.example".into(), &2.into()));
}

#[test]
fn shown_name_in_two_parts_is_held_back_until_it_is_judged() {
    let upstream = Upstream::start(b"secret");
    let dns = DnsServer::start(&[("good.example", "127.0.0.1")]);
    let flags = ["--allow-host", "good.example", "--names-into", "127.0.0.0/8"];
    let mut guest = Guest::start_with_dns(&dns, &flags);
    guest.resolve("good.example.").unwrap();
    let handle = guest.connect(upstream.address);
    let dialled = |guest: &mut Guest| guest.status()["totals"]["connections"] == 1;
    assert_eq!(guest.until(|guest| dialled(guest).then_some(())), Some(()));
    let hello = tls_hello("evil.example");
    let (first, rest) = hello.split_at(20);
    guest.socket(handle).send_slice(first).unwrap();
    // The part is with the gateway as soon as it is acknowledged.
    let taken = |guest: &mut Guest| guest.socket(handle).send_queue() == 0;
    assert_eq!(guest.until(|guest| taken(guest).then_some(())), Some(()));
    assert_eq!(guest.talk(handle, rest), End::Reset);
    assert_eq!(guest.status()["totals"]["bytes_out"], 0);
    assert!(upstream.heard().iter().all(Vec::is_empty));
}

#[test]
fn connection_at_port_443_without_a_name_is_reset_and_never_dialled() {
    let dns = DnsServer::start(&[("good.example", "127.0.0.1")]);
    let flags = ["--allow-host", "good.example", "--names-into", "127.0.0.0/8"];
    let mut guest = Guest::start_with_dns(&dns, &flags);
    guest.resolve("good.example.").unwrap();
    for bytes in [&b"SSH-2.0-tunnel\r\n"[..], b"\0\0\0\0", &encrypted_hello("good.example")] {
        refused(&mut guest, address("127.0.0.1:443"), bytes);
    }
    assert_eq!(guest.denials(), ["no-name", "encrypted-hello"]);
    assert_eq!(guest.status()["denied"][0]["count"], 2);
}

#[test]
fn connection_at_a_named_port_is_not_dialled_before_its_name_is_allowed() {
    let upstream = Upstream::silent();
    let dns = DnsServer::start(&[("good.example", "127.0.0.1")]);
    let port = upstream.address.port().to_string();
    let mut flags = vec!["--allow-host", "good.example", "--names-into", "127.0.0.0/8"];
    flags.extend(["--named-port", &port]);
    let mut guest = Guest::start_with_dns(&dns, &flags);
    guest.resolve("good.example.").unwrap();
    for bytes in [tls_hello("evil.example"), http("evil.example"), b"x".to_vec()] {
        refused(&mut guest, upstream.address, &bytes);
    }
    assert!(upstream.heard().is_empty());
}

#[test]
fn port_without_a_rule_is_reset() {
    let upstream = Upstream::start(b"secret");
    let dns = DnsServer::start(&[("good.example", "127.0.0.1")]);
    let flags = ["--allow-host", "good.example:443", "--names-into", "127.0.0.0/8"];
    let mut guest = Guest::start_with_dns(&dns, &flags);
    guest.resolve("good.example.").unwrap();
    refused(&mut guest, upstream.address, &http("good.example"));
    assert!(upstream.heard().is_empty());
    assert_eq!(guest.denials(), ["name-not-allowed"]);
}

#[test]
fn deny_rule_holds_for_a_name_whose_address_is_allowed() {
    let upstream = Upstream::start(b"secret");
    let mut guest = Guest::start(&["--allow", "127.0.0.0/8", "--deny", "evil.example"]);
    refused(&mut guest, upstream.address, &tls_hello("evil.example"));
    assert!(upstream.heard().iter().all(Vec::is_empty));
    let good = guest.exchange(upstream.address, &tls_hello("good.example"));
    assert_eq!(good, End::Closed(b"secret".to_vec()));
}
