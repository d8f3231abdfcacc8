//! The control protocol: a JSON object on a line, and one line in answer.
//!
//! | request | answer |
//! | --- | --- |
//! | `{"set": {"allow": [], "allow_host": [], …}}`: the whole policy | `{"ok": true}` |
//! | `{"allow": "192.0.2.0/24:443"}`, `{"allow_host": "*.example.com"}`, `{"deny": "…"}` | `{"ok": true}` |
//! | `{"check": "example.com:443"}`, `{"check": "192.0.2.1:53/udp"}` | `{"allowed": true, "rule": "…"}`, or `false`, `reason`, `message` |
//! | `{"status": {}}` | `rules`, `secrets`, `denied`, `dropped`, `totals`, `open_connections`, `open_associations` (UDP) |
//! | `{"connections": {}}` | `connections` over TCP: `guest_port` and `destination` of each |
//! | any other | `{"error": "…"}` |
//!
//! A request is carried out whole or not at all. `control_server.rs` has the sockets.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::gateway::Gateway;
use crate::policy::{
    Denial, Policy, PolicyDocument, PolicyError, Port, Protocol, Rule, Verdict, normal_name,
};

/// A request of a control client.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Replaces the whole policy.
    Set(PolicyDocument),
    /// Adds a rule for a network.
    Allow(String),
    /// Adds a rule for a name.
    AllowHost(String),
    /// Adds a rule that denies a network or a name.
    Deny(String),
    /// Asks whether `name[:port[/udp]]` or `address:port[/udp]` is allowed, and by which rule.
    Check(String),
    /// Asks for rules, counters and denied attempts.
    Status {},
    /// Asks for the guest's open connections over TCP.
    Connections {},
}

/// Carries out the request on a line and returns the answer's line, without its end.
pub fn answer(line: &[u8], gateway: &mut Gateway) -> String {
    let done = match serde_json::from_slice(line) {
        Ok(request) => carry_out(request, gateway),
        Err(error) => Err(format!("not a request: {error}")),
    };
    done.unwrap_or_else(|message| json!({ "error": message })).to_string()
}

fn carry_out(request: Request, gateway: &mut Gateway) -> Result<Value, String> {
    let text = |error: PolicyError| error.to_string();
    let mut policy = gateway.policy.clone();
    match request {
        Request::Set(document) => policy = Policy::new(&document).map_err(text)?,
        Request::Allow(rule) => {
            Rule::network(&rule).and_then(|rule| policy.allow(rule)).map_err(text)?;
        }
        Request::AllowHost(rule) => {
            Rule::host(&rule).and_then(|rule| policy.allow(rule)).map_err(text)?;
        }
        Request::Deny(rule) => Rule::any(&rule).and_then(|rule| policy.deny(rule)).map_err(text)?,
        Request::Check(target) => return check(&target, &policy),
        Request::Connections {} => {
            return Ok(json!({ "connections": gateway.connection_keys() }));
        }
        Request::Status {} => {
            let open = gateway.open_connections();
            let report = gateway.counters.report(&gateway.policy);
            let mut report = serde_json::to_value(report).map_err(|error| error.to_string())?;
            report["open_connections"] = open.into();
            report["open_associations"] = gateway.open_associations().into();
            report["secrets"] = serde_json::to_value(gateway.secrets.report())
                .map_err(|error| error.to_string())?;
            return Ok(report);
        }
    }
    gateway.set_policy(policy);
    Ok(json!({ "ok": true }))
}

/// Judges a target as a connection to it would be.
fn check(target: &str, policy: &Policy) -> Result<Value, String> {
    let usage = || format!("{target:?}: write a name or address and a port, as in example.com:443");
    let (host, port) = match target.rsplit_once(':') {
        Some((host, port)) => (host, Some(parse_port(port).ok_or_else(usage)?)),
        None => (target, None),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let verdict = match (host.parse::<IpAddr>(), port) {
        (Ok(address), Some(port)) => policy.judge_address(address, port),
        (Ok(_), None) => return Err(usage()),
        (Err(_), port) => policy.judge_name(&normal_name(host).ok_or_else(usage)?, port),
    };
    Ok(match verdict {
        Verdict::Allowed(rule) => json!({ "allowed": true, "rule": &*rule }),
        Verdict::Denied(denial) => refusal(denial),
    })
}

/// Reads a port, of TCP unless it says otherwise.
fn parse_port(text: &str) -> Option<Port> {
    let (number, protocol) = match text.split_once('/') {
        Some((number, word)) => (number, Protocol::from_word(word)?),
        None => (text, Protocol::Tcp),
    };
    Some(Port { number: number.parse().ok()?, protocol })
}

fn refusal(denial: Denial) -> Value {
    json!({ "allowed": false, "reason": denial.word(), "message": denial.explain() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> Policy {
        let document = r#"{"allow": ["1.1.1.0/24:443"], "allow_host": ["*.example.com"]}"#;
        Policy::new(&serde_json::from_str(document).unwrap()).unwrap()
    }

    #[test]
    fn check_names_the_rule_or_the_reason() {
        let check = |target| check(target, &policy()).unwrap();
        assert_eq!(check("a.example.com:443")["rule"], "*.example.com");
        assert_eq!(check("1.1.1.1:443")["rule"], "1.1.1.0/24:443");
        assert_eq!(check("1.1.1.1:80")["reason"], "no-rule");
        assert_eq!(check("169.254.169.254:80")["reason"], "special-range");
        assert_eq!(check("[::ffff:127.0.0.1]:80")["reason"], "special-range");
        assert_eq!(check("example.com:443")["reason"], "name-not-allowed");
        assert_eq!(check("1.1.1.1:443/tcp")["rule"], "1.1.1.0/24:443");
        assert_eq!(check("1.1.1.1:443/udp")["reason"], "protocol");
        assert_eq!(check("a.example.com:443/udp")["reason"], "quic");
    }

    #[test]
    fn check_of_nonsense_says_how_to_write_it() {
        for target in ["", "1.1.1.1", "a b:1", "a:99999", ":", "a.example:1/sctp", "a.example:/udp"]
        {
            assert!(check(target, &policy()).unwrap_err().contains("example.com:443"), "{target}");
        }
    }

    #[test]
    fn request_of_unknown_form_is_refused() {
        for line in ["", "{}", "[]", r#"{"set": {"alow": []}}"#, r#"{"drop": 1}"#, r#""status""#] {
            assert!(serde_json::from_str::<Request>(line).is_err(), "{line}");
        }
        for line in [r#"{"status": {}}"#, r#"{"connections": {}}"#] {
            assert!(serde_json::from_str::<Request>(line).is_ok());
        }
    }
}
