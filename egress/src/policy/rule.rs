//! One rule of a policy: its forms, how they are read, and what it matches.
//!
//! Rules are text of a person, so one that is not accepted says how to write it (`PolicyError`).

use std::fmt;
use std::net::IpAddr;
use std::rc::Rc;

use super::PolicyError;
use crate::ranges::Cidr;

/// A protocol that has ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
}

/// A port of one protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Port {
    pub number: u16,
    pub protocol: Protocol,
}

/// The port that a rule names, and the protocol if it names one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RulePort {
    pub number: u16,
    pub protocol: Option<Protocol>,
}

/// Where a rule applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Target {
    All,
    Network { cidr: Cidr, port: Option<RulePort> },
    Host { suffix: String, wildcard: bool, port: Option<RulePort> },
}

/// A checked rule and its text in one normal form, by which it is counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub(super) target: Target,
    pub(super) text: Rc<str>,
}

impl Protocol {
    /// Returns the word that rules and records have for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }

    /// Reads the word.
    pub fn from_word(word: &str) -> Option<Self> {
        [Self::Tcp, Self::Udp].into_iter().find(|protocol| protocol.word() == word)
    }

    fn other(self) -> Self {
        match self {
            Self::Tcp => Self::Udp,
            Self::Udp => Self::Tcp,
        }
    }
}

impl Port {
    pub const fn tcp(number: u16) -> Self {
        Self { number, protocol: Protocol::Tcp }
    }

    pub const fn udp(number: u16) -> Self {
        Self { number, protocol: Protocol::Udp }
    }

    /// Returns the port of this number of the other protocol.
    pub(super) fn of_other_protocol(self) -> Self {
        Self { protocol: self.protocol.other(), ..self }
    }
}

impl RulePort {
    /// Returns whether a rule that allows this port allows `port`. TCP is meant if the rule names
    /// no protocol, as in other tools that have ports.
    pub(super) fn allows(self, port: Port) -> bool {
        self.number == port.number && self.protocol.unwrap_or(Protocol::Tcp) == port.protocol
    }

    /// Returns whether a rule that denies this port denies `port`. Both protocols are meant if the
    /// rule names none: a denial with a gap would be no denial.
    fn denies(self, port: Port) -> bool {
        self.number == port.number && self.protocol.is_none_or(|it| it == port.protocol)
    }

    fn parse(rule: &str, text: &str) -> Result<Self, PolicyError> {
        let (number, word) = match text.split_once('/') {
            Some((number, word)) => (number, Some(word)),
            None => (text, None),
        };
        let number = parse_port(rule, number)?;
        let unknown =
            |word: &str| PolicyError::Protocol { rule: rule.to_owned(), protocol: word.to_owned() };
        let read = |word: &str| Protocol::from_word(word).ok_or_else(|| unknown(word));
        Ok(Self { number, protocol: word.map(read).transpose()? })
    }
}

impl fmt::Display for RulePort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.protocol {
            Some(protocol) => write!(f, ":{}/{}", self.number, protocol.word()),
            None => write!(f, ":{}", self.number),
        }
    }
}

/// Returns whether a rule is for addresses: it begins with one, or is `all`.
pub(super) fn is_network(text: &str) -> bool {
    let first = text.split([':', '/']).next().unwrap_or_default();
    text == "all" || first.parse::<IpAddr>().is_ok() || text.contains("::")
}

impl Rule {
    /// Parses `CIDR[:port[/tcp|/udp]]` or `all`.
    pub fn network(text: &str) -> Result<Self, PolicyError> {
        if text == "all" {
            return Ok(Self { target: Target::All, text: text.into() });
        }
        // An IPv6 network has colons of its own, and is refused by name.
        let v6 = text.matches(':').count() > 1;
        let (network, port) = match text.split_once(':') {
            Some((network, port)) if !v6 => (network, Some(port)),
            _ => (text, None),
        };
        let cidr = cidr(text, network)?;
        let port = port.map(|port| RulePort::parse(text, port)).transpose()?;
        let normal = format!("{cidr}{}", suffix_of(port));
        Ok(Self { target: Target::Network { cidr, port }, text: normal.into() })
    }

    /// Parses `name[:port[/tcp|/udp]]` or `*.name[:port[/tcp|/udp]]`.
    pub fn host(text: &str) -> Result<Self, PolicyError> {
        let rule = || text.to_owned();
        if text.parse::<IpAddr>().is_ok() || text.parse::<Cidr>().is_ok() {
            return Err(PolicyError::AddressAsHost { rule: rule() });
        }
        let (name, port) = match text.split_once(':') {
            Some((name, port)) => (name, Some(RulePort::parse(text, port)?)),
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
        let normal = format!("{star}{suffix}{}", suffix_of(port));
        Ok(Self { target: Target::Host { suffix, wildcard, port }, text: normal.into() })
    }

    /// Parses either form: what begins with an address is a network.
    pub fn any(text: &str) -> Result<Self, PolicyError> {
        if is_network(text) { Self::network(text) } else { Self::host(text) }
    }

    pub fn text(&self) -> &Rc<str> {
        &self.text
    }

    /// Returns whether the rule, which allows, fits an address. Without a port it is for both
    /// protocols.
    pub(super) fn allows_address(&self, address: IpAddr, port: Port) -> bool {
        match &self.target {
            Target::All => true,
            Target::Network { cidr, port: at } => {
                cidr.contains(address) && at.is_none_or(|at| at.allows(port))
            }
            Target::Host { .. } => false,
        }
    }

    /// Returns whether the rule, which denies, fits an address.
    pub(super) fn denies_address(&self, address: IpAddr, port: Port) -> bool {
        match &self.target {
            Target::All => true,
            Target::Network { cidr, port: at } => {
                cidr.contains(address) && at.is_none_or(|at| at.denies(port))
            }
            Target::Host { .. } => false,
        }
    }

    /// Returns whether the rule, which allows, fits a name, at one port or, for a DNS question, at
    /// any. UDP shows no name, so a rule that does not say `/udp` is for TCP.
    pub(super) fn allows_name(&self, name: &str, port: Option<Port>) -> bool {
        let is_tcp = port.is_none_or(|port| port.protocol == Protocol::Tcp);
        match &self.target {
            Target::All => is_tcp,
            Target::Network { .. } => false,
            Target::Host { suffix, wildcard, port: at } => {
                let fits = match (at, port) {
                    (Some(at), Some(port)) => at.allows(port),
                    (None, _) => is_tcp,
                    (_, None) => true,
                };
                fits && is_below(name, suffix, *wildcard)
            }
        }
    }

    /// Returns whether the rule, which denies, fits a name. A DNS question is refused only by a
    /// denial of all ports.
    pub(super) fn denies_name(&self, name: &str, port: Option<Port>) -> bool {
        match &self.target {
            Target::All => true,
            Target::Network { .. } => false,
            Target::Host { suffix, wildcard, port: at } => {
                let fits = match (at, port) {
                    (Some(at), Some(port)) => at.denies(port),
                    (Some(_), None) => false,
                    (None, _) => true,
                };
                fits && is_below(name, suffix, *wildcard)
            }
        }
    }

    /// Returns whether the rule is for this address and says UDP in so many words.
    pub(super) fn names_udp(&self, address: IpAddr, number: u16) -> bool {
        let named = RulePort { number, protocol: Some(Protocol::Udp) };
        match self.target {
            Target::Network { cidr, port } => cidr.contains(address) && port == Some(named),
            Target::All | Target::Host { .. } => false,
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

fn suffix_of(port: Option<RulePort>) -> String {
    port.map(|port| port.to_string()).unwrap_or_default()
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
