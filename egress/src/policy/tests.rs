//! Judgements of a policy, one property each.

use super::*;

fn policy(allow: &[&str], hosts: &[&str], deny: &[&str]) -> Policy {
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    let document = PolicyDocument {
        allow: owned(allow),
        allow_host: owned(hosts),
        deny: owned(deny),
        ..PolicyDocument::default()
    };
    Policy::new(&document).unwrap()
}

fn address(policy: &Policy, address: &str, port: u16) -> Verdict {
    policy.judge_address(address.parse().unwrap(), Port::tcp(port))
}

fn allowed(rule: &str) -> Verdict {
    Verdict::Allowed(rule.into())
}

#[test]
fn policy_without_rules_denies_everything() {
    let none = Policy::default();
    assert_eq!(address(&none, "1.1.1.1", 443), Verdict::Denied(Denial::NoRule));
    assert_eq!(none.judge_name("example.com", None), Verdict::Denied(Denial::NameNotAllowed));
}

#[test]
fn network_rule_holds_for_its_network_and_port() {
    let policy = policy(&["140.82.112.0/20:443", "1.1.1.1"], &[], &[]);
    assert_eq!(address(&policy, "140.82.127.255", 443), allowed("140.82.112.0/20:443"));
    assert_eq!(address(&policy, "140.82.127.255", 80), Verdict::Denied(Denial::NoRule));
    assert_eq!(address(&policy, "140.82.128.0", 443), Verdict::Denied(Denial::NoRule));
    assert_eq!(address(&policy, "1.1.1.1", 5), allowed("1.1.1.1/32"));
    assert!(!policy.judge_name("example.com", None).is_allowed());
}

#[test]
fn allow_all_leaves_special_ranges_closed() {
    for rule in ["all", "0.0.0.0/0", "0.0.0.0/1", "8.0.0.0/5"] {
        let policy = policy(&[rule], &[], &[]);
        for target in ["169.254.169.254", "10.0.0.1", "127.0.0.1", "192.168.0.1", "100.64.0.1"] {
            assert!(!address(&policy, target, 80).is_allowed(), "{rule} {target}");
            let resolved = policy.judge_resolved(target.parse().unwrap(), Some(Port::tcp(80)));
            assert_eq!(resolved, Err(Denial::SpecialRange), "{rule} {target}");
        }
    }
    assert!(address(&policy(&["all"], &[], &[]), "1.1.1.1", 80).is_allowed());
}

#[test]
fn special_range_opens_to_a_rule_that_names_it() {
    let policy = policy(&["10.1.0.0/16:5432", "169.254.0.0/16"], &["db.example.com"], &[]);
    assert!(address(&policy, "10.1.2.3", 5432).is_allowed());
    assert!(!address(&policy, "10.1.2.3", 80).is_allowed());
    assert!(!address(&policy, "10.2.2.3", 5432).is_allowed());
    assert!(address(&policy, "169.254.169.254", 80).is_allowed());
    let resolved = |port| policy.judge_resolved("10.1.2.3".parse().unwrap(), Some(Port::tcp(port)));
    assert_eq!((resolved(5432), resolved(80)), (Ok(()), Err(Denial::SpecialRange)));
}

#[test]
fn names_into_opens_a_range_for_names_and_not_for_addresses() {
    let document = PolicyDocument {
        allow_host: vec!["git.corp.example".to_owned()],
        names_into: vec!["10.0.0.0/8".to_owned(), "0.0.0.0/0".to_owned()],
        ..PolicyDocument::default()
    };
    let policy = Policy::new(&document).unwrap();
    let inside: IpAddr = "10.9.9.9".parse().unwrap();
    assert_eq!(policy.judge_resolved(inside, Some(Port::tcp(443))), Ok(()));
    assert!(!policy.judge_address(inside, Port::tcp(443)).is_allowed());
    let outside = policy.judge_resolved("192.168.0.1".parse().unwrap(), Some(Port::tcp(443)));
    assert_eq!(outside, Err(Denial::SpecialRange));
}

#[test]
fn mapped_address_is_judged_as_the_one_inside() {
    let policy = policy(&["all"], &[], &["9.9.9.9"]);
    assert!(!address(&policy, "::ffff:169.254.169.254", 80).is_allowed());
    let denied = Verdict::Denied(Denial::DeniedByRule);
    assert_eq!(address(&policy, "::ffff:9.9.9.9", 80), denied);
}

#[test]
fn host_rule_matches_its_name_only() {
    let policy = policy(&[], &["Example.COM.", "*.wild.example:443"], &[]);
    assert_eq!(policy.judge_name("example.com", Some(Port::tcp(22))), allowed("example.com"));
    assert_eq!(
        policy.judge_name("a.b.wild.example", Some(Port::tcp(443))),
        allowed("*.wild.example:443")
    );
    for (name, port) in [
        ("www.example.com", 443),
        ("notexample.com", 443),
        ("example.com.evil.org", 443),
        ("wild.example", 443),
        ("notwild.example", 443),
        (".wild.example", 443),
        ("a.wild.example", 80),
    ] {
        assert!(!policy.judge_name(name, Some(Port::tcp(port))).is_allowed(), "{name}");
    }
    assert!(policy.judge_name("a.wild.example", None).is_allowed());
}

#[test]
fn deny_comes_before_allow() {
    let policy =
        policy(&["all"], &["*.example.com"], &["bad.example.com", "9.9.9.0/24", "x.org:25"]);
    let denied = Verdict::Denied(Denial::DeniedByRule);
    assert_eq!(policy.judge_name("bad.example.com", Some(Port::tcp(443))), denied);
    assert_eq!(policy.judge_name("bad.example.com", None), denied);
    assert_eq!(address(&policy, "9.9.9.9", 443), denied);
    let resolved = policy.judge_resolved("9.9.9.9".parse().unwrap(), Some(Port::tcp(443)));
    assert_eq!(resolved, Err(Denial::DeniedByRule));
    assert!(policy.judge_name("good.example.com", Some(Port::tcp(443))).is_allowed());
    // A denial of one port is no reason to hide the name.
    assert!(policy.judge_name("x.org", None).is_allowed());
    assert_eq!(policy.judge_name("x.org", Some(Port::tcp(25))), denied);
}

#[test]
fn rules_of_one_list_are_told_apart_by_their_start() {
    let rules = ["10.0.0.0/8", "192.0.2.1:443", "example.com:443", "*.example.org", "*"];
    let document = PolicyDocument::allowing(rules);
    assert_eq!(document.allow, ["10.0.0.0/8", "192.0.2.1:443", "all"]);
    assert_eq!(document.allow_host, ["example.com:443", "*.example.org"]);
}

#[test]
fn rule_added_later_replaces_its_opposite() {
    let mut policy = policy(&["all"], &[], &[]);
    policy.deny(Rule::any("1.1.1.1").unwrap()).unwrap();
    assert!(!address(&policy, "1.1.1.1", 53).is_allowed());
    policy.allow(Rule::network("1.1.1.1/32").unwrap()).unwrap();
    assert!(address(&policy, "1.1.1.1", 53).is_allowed());
    policy.deny(Rule::any("all").unwrap()).unwrap();
    assert!(!address(&policy, "8.8.8.8", 53).is_allowed());
}

#[test]
fn own_address_opens_to_a_rule_for_it_alone() {
    let own: IpAddr = "192.168.7.7".parse().unwrap();
    let opens = |rule, port| policy(&[rule], &[], &[]).opens_own_address(own, port);
    assert!(!opens("192.168.0.0/16", Port::tcp(80)));
    assert!(opens("192.168.7.7", Port::tcp(80)) && opens("192.168.7.7", Port::udp(80)));
    assert!(opens("192.168.7.7:80", Port::tcp(80)));
    assert!(!opens("192.168.7.7:80", Port::udp(80)) && !opens("192.168.7.7:80", Port::tcp(81)));
    let loopback = policy(&["127.0.0.0/8"], &[], &[]);
    assert!(loopback.opens_own_address("127.0.0.1".parse().unwrap(), Port::tcp(1)));
}

#[test]
fn udp_is_allowed_by_a_rule_without_a_port_or_one_that_names_it() {
    let rules = ["1.1.1.1", "8.8.8.8:53/udp", "9.9.9.9:53", "7.7.7.7:53/tcp"];
    let policy = policy(&rules, &[], &[]);
    let udp = |address: &str, port| policy.judge_address(address.parse().unwrap(), Port::udp(port));
    assert_eq!(udp("1.1.1.1", 5), allowed("1.1.1.1/32"));
    assert_eq!(udp("8.8.8.8", 53), allowed("8.8.8.8/32:53/udp"));
    assert_eq!(udp("8.8.8.8", 54), Verdict::Denied(Denial::NoRule));
    for address in ["9.9.9.9", "7.7.7.7"] {
        assert_eq!(udp(address, 53), Verdict::Denied(Denial::Protocol), "{address}");
    }
    assert_eq!(address(&policy, "8.8.8.8", 53), Verdict::Denied(Denial::Protocol));
}

#[test]
fn udp_to_a_special_range_is_closed_with_allow_all() {
    let policy = policy(&["all", "10.1.0.0/16:53/udp"], &[], &[]);
    let udp = |address: &str, port| policy.judge_address(address.parse().unwrap(), Port::udp(port));
    assert_eq!(udp("1.1.1.1", 443), allowed("all"));
    assert_eq!(udp("10.1.2.3", 53), allowed("10.1.0.0/16:53/udp"));
    for target in ["169.254.169.254", "10.1.2.3", "127.0.0.1", "224.0.0.251", "255.255.255.255"] {
        assert_eq!(udp(target, 123), Verdict::Denied(Denial::SpecialRange), "{target}");
    }
}

#[test]
fn udp_to_a_name_is_allowed_by_a_rule_that_names_it() {
    let policy = policy(&["all"], &["a.example", "ntp.example:123/udp", "b.example:123"], &[]);
    let udp = |name, port| policy.judge_name(name, Some(Port::udp(port)));
    assert_eq!(udp("ntp.example", 123), allowed("ntp.example:123/udp"));
    assert_eq!(udp("ntp.example", 124), Verdict::Denied(Denial::Protocol));
    assert_eq!(udp("a.example", 123), Verdict::Denied(Denial::Protocol));
    assert_eq!(udp("b.example", 123), Verdict::Denied(Denial::Protocol));
    assert!(policy.judge_name("ntp.example", None).is_allowed());
}

#[test]
fn quic_is_denied_where_names_are_judged() {
    let by_name = policy(&[], &["a.example"], &[]);
    let quic = Verdict::Denied(Denial::Quic);
    assert_eq!(by_name.judge_name("a.example", Some(Port::udp(443))), quic);
    let denied = policy(&["all", "9.9.9.9:443/udp"], &[], &["evil.example"]);
    let udp = |address: &str, port| denied.judge_address(address.parse().unwrap(), Port::udp(port));
    assert_eq!((udp("1.1.1.1", 443), udp("1.1.1.1", 80)), (quic.clone(), quic));
    assert_eq!((udp("1.1.1.1", 123), udp("9.9.9.9", 443)), (allowed("all"), allowed("all")));
    let message = Rule::host("a.example:443/udp").and_then(|rule| Policy::default().allow(rule));
    assert!(message.unwrap_err().to_string().contains("192.0.2.0/24:443/udp"));
}

#[test]
fn deny_without_a_protocol_is_for_both() {
    let deny = ["9.9.9.9:53", "8.8.8.8:53/udp", "x.example:123"];
    let policy = policy(&["all"], &["x.example:123/udp"], &deny);
    let denied = Verdict::Denied(Denial::DeniedByRule);
    let judge = |address: &str, port| policy.judge_address(address.parse().unwrap(), port);
    assert_eq!(judge("9.9.9.9", Port::tcp(53)), denied);
    assert_eq!(judge("9.9.9.9", Port::udp(53)), denied);
    assert_eq!(judge("8.8.8.8", Port::udp(53)), denied);
    assert_eq!(judge("8.8.8.8", Port::tcp(53)), allowed("all"));
    assert_eq!(policy.judge_name("x.example", Some(Port::udp(123))), denied);
}

#[test]
fn rule_that_does_not_parse_names_itself_and_the_fix() {
    let network = |text| Rule::network(text).unwrap_err().to_string();
    let host = |text| Rule::host(text).unwrap_err().to_string();
    for (message, parts) in [
        (network("10.0.0.1/8"), ["\"10.0.0.1/8\"", "write 10.0.0.0/8"]),
        (network("10.0.0.0/8:http"), ["\"10.0.0.0/8:http\"", "1 to 65535"]),
        (network("10.0.0.0/8:0"), ["\"10.0.0.0/8:0\"", "1 to 65535"]),
        (network("10.0.0.0/8:+5"), ["\"10.0.0.0/8:+5\"", "1 to 65535"]),
        (network("1.2.3.4:53/sctp"), ["\"sctp\"", "write tcp or udp"]),
        (network("1.2.3.4:53/"), ["\"\"", "write tcp or udp"]),
        (network("1.2.3.4:/udp"), ["\"1.2.3.4:/udp\"", "1 to 65535"]),
        (host("a.example:1/UDP"), ["\"UDP\"", "write tcp or udp"]),
        (network("example.com"), ["\"example.com\"", "such as 192.0.2.0/24"]),
        (network("2001:db8::/32"), ["2001:db8::/32", "IPv4"]),
        (host("1.2.3.4"), ["\"1.2.3.4\"", "use allow"]),
        (host("1.2.3.4:80"), ["\"1.2.3.4:80\"", "use allow"]),
        (host("*"), ["\"*\"", "*.example.com"]),
        (host("*.com"), ["\"*.com\"", "*.example.com"]),
        (host("a.*.com"), ["\"a.*.com\"", "*.example.com"]),
        (host("https://example.com"), ["https://example.com", "1 to 65535"]),
        (host("exa mple.com"), ["exa mple.com", "host name"]),
        (host(""), ["\"\"", "host name"]),
    ] {
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        assert!(!message.contains('\n'));
    }
}

#[test]
fn name_in_normal_form_is_lower_case_and_never_an_address() {
    assert_eq!(normal_name("Api.EXAMPLE.com.").as_deref(), Some("api.example.com"));
    let long = format!("{}.com", "a".repeat(64));
    for text in ["", ".", "a..b", "1.2.3.4", "0x7f.1", "127.0.0.0x1", "ä.de", "a b", &long] {
        assert_eq!(normal_name(text), None, "{text}");
    }
}

#[test]
fn policy_of_too_many_rules_is_refused() {
    let allow_host = (0..=RULES_MAX).map(|number| format!("h{number}.example")).collect();
    let document = PolicyDocument { allow_host, ..PolicyDocument::default() };
    assert!(matches!(Policy::new(&document), Err(PolicyError::TooMany { .. })));
}
