//! A policy that changes while connections are open, and a process that refuses a bad one.

use std::process::Command;

use super::fixture::{DnsServer, End, Guest, Upstream};

#[test]
fn new_policy_resets_what_it_denies_and_keeps_the_rest() {
    let (kept, ended) = (Upstream::silent(), Upstream::silent());
    let mut guest = Guest::start(&["--allow", "127.0.0.0/8"]);
    let (stays, goes) = (guest.connect(kept.address), guest.connect(ended.address));
    assert!(guest.is_accepted(stays) && guest.is_accepted(goes));
    let dialled = |guest: &mut Guest| guest.status()["totals"]["connections"] == 2;
    assert_eq!(guest.until(|guest| dialled(guest).then_some(())), Some(()));
    let rule = format!("127.0.0.1/32:{}", kept.address.port());
    guest.control(&format!(r#"{{"set": {{"allow": ["{rule}"]}}}}"#));
    assert_eq!(guest.talk(goes, b""), End::Reset);
    assert!(guest.socket(stays).may_send());
    assert_eq!(guest.exchange(ended.address, b"x"), End::Reset);
    assert_eq!(guest.status()["rules"][0]["rule"], rule);
}

#[test]
fn rules_are_added_and_denied_one_by_one() {
    let upstream = Upstream::start(b"page");
    let mut guest = Guest::start(&[]);
    assert_eq!(guest.exchange(upstream.address, b"x"), End::Reset);
    assert_eq!(guest.control(r#"{"allow": "127.0.0.0/8"}"#)["ok"], true);
    assert_eq!(guest.exchange(upstream.address, b"x"), End::Closed(b"page".to_vec()));
    assert_eq!(guest.control(r#"{"deny": "127.0.0.1"}"#)["ok"], true);
    assert_eq!(guest.exchange(upstream.address, b"x"), End::Reset);
    assert_eq!(guest.control(r#"{"allow_host": "a.example:443"}"#)["ok"], true);
    let check = guest.control(r#"{"check": "a.example:443"}"#);
    assert_eq!((&check["allowed"], &check["rule"]), (&true.into(), &"a.example:443".into()));
    let check = guest.control(r#"{"check": "127.0.0.1:80"}"#);
    assert_eq!((&check["allowed"], &check["reason"]), (&false.into(), &"denied-by-rule".into()));
}

#[test]
fn bad_request_changes_nothing_and_says_why() {
    let mut guest = Guest::start(&["--allow", "127.0.0.0/8"]);
    let answer = guest.control(r#"{"set": {"allow": ["1.1.1.1", "10.0.0.1/8"]}}"#);
    assert!(answer["error"].as_str().unwrap().contains("write 10.0.0.0/8"));
    for request in ["{", "{}", "null", r#"{"set": {"allows": []}}"#, r#"{"allow": 5}"#] {
        assert!(guest.control(request)["error"].is_string(), "{request}");
    }
    assert_eq!(guest.status()["rules"][0]["rule"], "127.0.0.0/8");
}

#[test]
fn name_rule_that_is_taken_back_ends_its_connections() {
    let upstream = Upstream::silent();
    let dns = DnsServer::start(&[("a.example", "127.0.0.1")]);
    let flags = ["--allow-host", "a.example", "--names-into", "127.0.0.0/8"];
    let mut guest = Guest::start_with_dns(&dns, &flags);
    guest.resolve("a.example.").unwrap();
    let handle = guest.connect(upstream.address);
    assert!(guest.is_accepted(handle));
    assert_eq!(guest.control(r#"{"deny": "a.example"}"#)["ok"], true);
    assert_eq!(guest.talk(handle, b""), End::Reset);
    assert!(guest.resolve("a.example.").is_err());
}

#[test]
fn d13_policy_that_does_not_parse_ends_the_process_with_status_2() {
    for (flag, rule, fix) in [
        ("--allow", "10.0.0.1/8", "write 10.0.0.0/8"),
        ("--allow-host", "*", "*.example.com"),
        ("--deny", "exa mple", "example.com"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_pvmm-egress"))
            .args(["--frames-fd", "3", flag, rule])
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(rule) && error.contains(fix), "{error}");
        assert_eq!(error.lines().count(), 1);
    }
}

#[test]
fn descriptor_that_is_not_there_is_named() {
    let output = Command::new(env!("CARGO_BIN_EXE_pvmm-egress"))
        .args(["--frames-fd", "99"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("--frames-fd 99"));
}
