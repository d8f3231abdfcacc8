//! One rule of a policy: its forms, how they are read, and what it matches.
//!
//! Rules are text of a person, so one that is not accepted says how to write it (`PolicyError`).

use std::net::IpAddr;
use std::rc::Rc;

use super::PolicyError;
use crate::ranges::Cidr;

/// Where a rule applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    All,
    Network { cidr: Cidr, port: Option<u16> },
    Host { suffix: String, wildcard: bool, port: Option<u16> },
}

/// A checked rule and its text in one normal form, by which it is counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub(super) target: Target,
    pub(super) text: Rc<str>,
}

impl Rule {
    /// Parses `CIDR[:port[/tcp]]` or `all`.
    pub fn network(text: &str) -> Result<Self, PolicyError> {
        if text == "all" {
            return Ok(Self { target: Target::All, text: text.into() });
        }
        let rule = || text.to_owned();
        // An IPv6 network has colons of its own, and is refused by name.
        let v6 = text.matches(':').count() > 1;
        let (network, port) = match text.split_once(':') {
            Some((network, port)) if !v6 => (network, Some(port)),
            _ => (text, None),
        };
        let cidr = cidr(text, network)?;
        let port = match port.map(|port| port.split_once('/').unwrap_or((port, "tcp"))) {
            Some((_, protocol)) if protocol != "tcp" => {
                return Err(PolicyError::Protocol { rule: rule(), protocol: protocol.to_owned() });
            }
            Some((port, _)) => Some(parse_port(text, port)?),
            None => None,
        };
        let normal = port.map_or_else(|| cidr.to_string(), |port| format!("{cidr}:{port}"));
        Ok(Self { target: Target::Network { cidr, port }, text: normal.into() })
    }

    /// Parses `name[:port]` or `*.name[:port]`.
    pub fn host(text: &str) -> Result<Self, PolicyError> {
        let rule = || text.to_owned();
        if text.parse::<IpAddr>().is_ok() || text.parse::<Cidr>().is_ok() {
            return Err(PolicyError::AddressAsHost { rule: rule() });
        }
        let (name, port) = match text.split_once(':') {
            Some((name, port)) => (name, Some(parse_port(text, port)?)),
            None => (text, None),
        };
        let (suffix, wildcard) = match name.strip_prefix("*.") {
            Some(suffix) => (suffix, true),
            None => (name, false),
        };
        if suffix.contains('*') || wildcard && !suffix.trim_end_matches('.').contains('.') {
            return Err(PolicyError::Star { rule: rule() });
        }
        if suffix.parse::<IpAddr>().is_ok() {
            return Err(PolicyError::AddressAsHost { rule: rule() });
        }
        let suffix = normal_name(suffix).ok_or_else(|| PolicyError::Host { rule: rule() })?;
        let star = if wildcard { "*." } else { "" };
        let at = port.map(|port| format!(":{port}")).unwrap_or_default();
        let normal = format!("{star}{suffix}{at}");
        Ok(Self { target: Target::Host { suffix, wildcard, port }, text: normal.into() })
    }

    /// Parses either form: what begins with an address is a network.
    pub fn any(text: &str) -> Result<Self, PolicyError> {
        let first = text.split([':', '/']).next().unwrap_or_default();
        let is_network = text == "all" || first.parse::<IpAddr>().is_ok() || text.contains("::");
        if is_network { Self::network(text) } else { Self::host(text) }
    }

    pub fn text(&self) -> &Rc<str> {
        &self.text
    }

    pub(super) fn has_address(&self, address: IpAddr, port: u16) -> bool {
        match &self.target {
            Target::All => true,
            Target::Network { cidr, port: at } => {
                cidr.contains(address) && port_fits(*at, Some(port))
            }
            Target::Host { .. } => false,
        }
    }

    pub(super) fn has_name(&self, name: &str, port: Option<u16>) -> bool {
        match &self.target {
            Target::All => true,
            Target::Network { .. } => false,
            Target::Host { suffix, wildcard, port: at } => {
                is_below(name, suffix, *wildcard) && port_fits(*at, port)
            }
        }
    }

    pub(super) fn denies_name(&self, name: &str, port: Option<u16>) -> bool {
        match &self.target {
            Target::Host { port: Some(_), .. } if port.is_none() => false,
            _ => self.has_name(name, port),
        }
    }
}

/// Returns a name in lower case and without its last dot, if it is one that a rule can have.
pub fn normal_name(text: &str) -> Option<String> {
    let text = text.strip_suffix('.').unwrap_or(text);
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let label = |label: &str| (1..=63).contains(&label.len()) && label.bytes().all(plain);
    let good = text.len() <= 253 && text.split('.').all(label);
    // The last label of an address in any notation is a number, and no top-level domain is.
    let last = text.rsplit('.').next().unwrap_or_default();
    let number = last.starts_with(|first: char| first.is_ascii_digit())
        && (last.bytes().all(|byte| byte.is_ascii_digit()) || last.starts_with("0x"));
    (good && !number).then(|| text.to_ascii_lowercase())
}

fn is_below(name: &str, suffix: &str, wildcard: bool) -> bool {
    if !wildcard {
        return name == suffix;
    }
    name.strip_suffix(suffix).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
}

pub(super) fn port_fits(rule: Option<u16>, port: Option<u16>) -> bool {
    match (rule, port) {
        (Some(rule), Some(port)) => rule == port,
        _ => true,
    }
}

fn parse_port(rule: &str, port: &str) -> Result<u16, PolicyError> {
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    match port.parse() {
        Ok(number) if digits && number > 0 => Ok(number),
        _ => Err(PolicyError::Port { rule: rule.to_owned(), port: port.to_owned() }),
    }
}

pub(super) fn cidr(rule: &str, network: &str) -> Result<Cidr, PolicyError> {
    let named = |source| PolicyError::Network {
        rule: rule.to_owned(),
        network: format!("{network:?}"),
        source,
    };
    let cidr: Cidr = network.parse().map_err(named)?;
    if cidr.is_ipv4() { Ok(cidr) } else { Err(PolicyError::Ipv6 { rule: rule.to_owned() }) }
}
