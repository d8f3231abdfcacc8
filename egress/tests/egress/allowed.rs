//! Traffic that a rule allows arrives, whole and in order.

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;

use super::fixture::{DnsServer, End, Guest, Upstream};
use super::{http, tls_hello};

const LOOPBACK: &[&str] = &["--allow", "127.0.0.0/8"];

fn said(text: &str) -> End {
    End::Closed(text.as_bytes().to_vec())
}

#[test]
fn address_that_a_rule_allows_is_reached() {
    let upstream = Upstream::start(b"hello");
    let mut guest = Guest::start(LOOPBACK);
    assert_eq!(guest.exchange(upstream.address, b"ping"), said("hello"));
    assert_eq!(upstream.heard(), [b"ping"]);
    let status = guest.status();
    assert_eq!(status["rules"][0]["rule"], "127.0.0.0/8");
    assert_eq!(status["rules"][0]["connections"], 1);
    assert_eq!(status["totals"]["bytes_out"], 4);
    assert_eq!(status["totals"]["bytes_in"], 5);
    assert!(guest.log().contains(r#""decision":"allow""#));
}

#[test]
fn server_that_speaks_first_is_heard() {
    let upstream = Upstream::greeting(b"220 ready\r\n");
    let dns = DnsServer::start(&[("mail.example", "127.0.0.1")]);
    let flags = ["--allow-host", "mail.example", "--names-into", "127.0.0.0/8"];
    let mut guest = Guest::start_with_dns(&dns, &flags);
    assert_eq!(guest.resolve("mail.example.").unwrap(), [*upstream.address.ip()]);
    assert_eq!(guest.exchange(upstream.address, b""), said("220 ready\r\n"));
}

#[test]
fn long_transfer_arrives_whole_in_both_directions() {
    const LEN: usize = 3 << 20;
    let bytes: Vec<u8> = (0..LEN).map(|at| (at * 31 + at / 251) as u8).collect();
    let upstream = Upstream::echo(LEN);
    let mut guest = Guest::start(LOOPBACK);
    let End::Closed(received) = guest.exchange(upstream.address, &bytes) else { panic!("reset") };
    assert!(received == bytes, "{} of {LEN} bytes", received.len());
    assert_eq!(guest.status()["rules"][0]["bytes_in"], LEN);
}

#[test]
fn name_that_a_rule_allows_is_resolved_and_reached() {
    let upstream = Upstream::start(b"page");
    let dns = DnsServer::start(&[("api.example.com", "127.0.0.1")]);
    let flags = ["--allow-host", "*.example.com", "--names-into", "127.0.0.0/8"];
    let mut guest = Guest::start_with_dns(&dns, &flags);
    assert_eq!(guest.resolve("API.example.com.").unwrap(), [*upstream.address.ip()]);
    let request = http("api.example.com");
    assert_eq!(guest.exchange(upstream.address, &request), said("page"));
    assert_eq!(guest.exchange(upstream.address, &tls_hello("api.example.com")), said("page"));
    assert_eq!(upstream.heard(), [request, tls_hello("api.example.com")]);
    let status = guest.status();
    assert_eq!(status["rules"][0]["rule"], "*.example.com");
    assert_eq!(status["rules"][0]["connections"], 2);
    // One question upstream serves every later one.
    guest.resolve("api.example.com.").unwrap();
    assert_eq!(dns.asked(), ["api.example.com"]);
}

#[test]
fn forged_name_is_dialled_where_it_leads_and_not_where_the_guest_points() {
    let real = Upstream::start_at("127.0.0.2:0", b"real");
    let port = real.address.port();
    let evil = Upstream::start_at(&format!("127.0.0.3:{port}"), b"evil");
    let dns = DnsServer::start(&[("a.example", "127.0.0.2"), ("b.example", "127.0.0.3")]);
    let named_port = port.to_string();
    let mut flags = vec!["--allow-host", "*.example.net", "--names-into", "127.0.0.0/8"];
    flags.extend(["--allow-host", "a.example", "--allow-host", "b.example"]);
    flags.extend(["--named-port", &named_port]);
    let mut guest = Guest::start_with_dns(&dns, &flags);
    assert_eq!(guest.resolve("b.example.").unwrap(), [*evil.address.ip()]);
    for hello in [tls_hello("a.example"), http("a.example")] {
        assert_eq!(guest.exchange(evil.address, &hello), said("real"));
    }
    assert!(evil.heard().is_empty());
}

#[test]
fn allowed_name_has_addresses_and_no_other_records() {
    let dns = DnsServer::start(&[("a.example", "127.0.0.1")]);
    let flags = ["--allow-host", "a.example", "--names-into", "127.0.0.0/8"];
    let mut guest = Guest::start_with_dns(&dns, &flags);
    for kind in [RecordType::AAAA, RecordType::TXT, RecordType::HTTPS, RecordType::MX] {
        assert_eq!(guest.ask("a.example.", kind), Ok(vec![]), "{kind}");
    }
    assert!(dns.asked().is_empty());
}

#[test]
fn name_that_does_not_exist_is_said_not_to() {
    let dns = DnsServer::start(&[]);
    let mut guest = Guest::start_with_dns(&dns, &["--allow-host", "a.example"]);
    assert_eq!(guest.resolve("a.example."), Err(ResponseCode::NXDomain));
}

#[test]
fn gateway_answers_echo() {
    let mut guest = Guest::start(&[]);
    // A first question makes the stacks know each other.
    let _ = guest.resolve("x.example.");
    guest.drain();
    guest.send_frame(&super::echo_request());
    let reply = guest.wait_frame().unwrap();
    assert_eq!((reply[23], reply[34]), (1, 0), "an echo reply");
}

#[test]
fn process_ends_when_the_card_is_gone() {
    assert_eq!(Guest::start(&[]).close(), Some(0));
}
