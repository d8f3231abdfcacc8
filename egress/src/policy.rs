//! Rules for what a sandbox may reach, and the judgement of an address or a name against them.
//!
//! The file is pure: no clock, no socket, no cache. Without a rule nothing is allowed. A rule that
//! denies comes before all that allow. Special ranges (`ranges.rs`) stay closed unless a rule names
//! them.

mod rule;

use std::net::IpAddr;
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use crate::ranges::{self, Cidr, CidrError};
pub use rule::{Port, Protocol, Rule, normal_name};
use rule::{RulePort, Target, cidr};

/// The most rules that one policy has.
pub const RULES_MAX: usize = 1024;
/// HTTP and HTTPS.
const NAMED_PORTS: [u16; 2] = [80, 443];

/// A policy as a file, flag or control message has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyDocument {
    /// `CIDR[:port[/tcp|/udp]]`, or `all`. A port without a protocol is one of TCP.
    pub allow: Vec<String>,
    /// `name[:port[/tcp|/udp]]`, or `*.name…` for the names below it. UDP is allowed by `/udp`
    /// only.
    pub allow_host: Vec<String>,
    /// Either of the two forms above. Without a protocol it is for both.
    pub deny: Vec<String>,
    /// Special ranges that an allowed name may lead to.
    pub names_into: Vec<String>,
    /// Ports beside 80 and 443 at which a client always shows a name first.
    pub named_ports: Vec<u16>,
    /// Accepts a TLS hello with an encrypted part by its outer name.
    pub allow_ech: bool,
}

impl PolicyDocument {
    /// Returns a policy that allows what one list of networks and names says. `*` is `all`.
    pub fn allowing<S: AsRef<str>>(rules: impl IntoIterator<Item = S>) -> Self {
        let mut document = Self::default();
        for rule in rules {
            match rule.as_ref() {
                "*" => document.allow.push("all".to_owned()),
                rule if rule::is_network(rule) => document.allow.push(rule.to_owned()),
                rule => document.allow_host.push(rule.to_owned()),
            }
        }
        document
    }
}

/// Why a rule is not accepted. The message names the rule and how to write it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    #[error("rule {rule:?}: {network} {source}")]
    Network { rule: String, network: String, source: CidrError },
    #[error("rule {rule:?}: port {port:?} is not a number from 1 to 65535")]
    Port { rule: String, port: String },
    #[error(
        "rule {rule:?}: protocol {protocol:?} is not carried; write tcp or udp, or leave it out"
    )]
    Protocol { rule: String, protocol: String },
    #[error("rule {rule:?}: IPv6 is not carried; write an IPv4 network")]
    Ipv6 { rule: String },
    #[error("rule {rule:?}: not a host name; write one such as example.com or *.example.com")]
    Host { rule: String },
    #[error("rule {rule:?}: an address, not a name; use allow instead of allow_host")]
    AddressAsHost { rule: String },
    #[error("rule {rule:?}: a star stands first and before two labels, as in *.example.com")]
    Star { rule: String },
    #[error(
        "rule {rule:?}: UDP at port {port} (QUIC) hides the name it is for; allow its network, as in \
         192.0.2.0/24:{port}/udp"
    )]
    Quic { rule: String, port: u16 },
    #[error("{count} rules; the most is {RULES_MAX}")]
    TooMany { count: usize },
}

/// A checked policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    allow: Vec<Rule>,
    deny: Vec<Rule>,
    names_into: Vec<Cidr>,
    named_ports: Vec<u16>,
    pub allow_ech: bool,
}

/// Why something is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Denial {
    /// No rule allows the address, and no allowed name was resolved to it.
    NoRule,
    /// A rule denies it.
    DeniedByRule,
    /// The address is private, link-local, metadata or the like.
    SpecialRange,
    /// The address is one of this host.
    OwnAddress,
    /// No rule allows the name, or not at this port.
    NameNotAllowed,
    /// The client showed no name in its first bytes.
    NoName,
    /// The client's TLS hello has an encrypted part, which hides the name.
    EncryptedHello,
    /// UDP at a port where clients show a name over TCP: it would hide the name.
    Quic,
    /// A rule is for the other of TCP and UDP, or this is for the gateway and not DNS or echo.
    Protocol,
    /// As many connections or queries as allowed are open.
    TooMany,
    /// A request to a host with secrets is not plain HTTP/1.1 for that host.
    RequestRefused,
    /// TLS with a host with secrets failed.
    ServerTls,
}

/// The judgement of an address or name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Allowed by the rule with this text.
    Allowed(Rc<str>),
    Denied(Denial),
}

impl Verdict {
    pub fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed(_))
    }
}

impl Denial {
    /// Returns the word that records and answers have for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::NoRule => "no-rule",
            Self::DeniedByRule => "denied-by-rule",
            Self::SpecialRange => "special-range",
            Self::OwnAddress => "own-address",
            Self::NameNotAllowed => "name-not-allowed",
            Self::NoName => "no-name",
            Self::EncryptedHello => "encrypted-hello",
            Self::Quic => "quic",
            Self::Protocol => "protocol",
            Self::TooMany => "too-many",
            Self::RequestRefused => "request-refused",
            Self::ServerTls => "server-tls",
        }
    }

    /// Returns a sentence for a person.
    pub fn explain(self) -> &'static str {
        match self {
            Self::NoRule => "no rule allows this address, and no allowed name leads to it",
            Self::DeniedByRule => "a rule denies it",
            Self::SpecialRange => {
                "the address is private, link-local, loopback, metadata or reserved; \
                 only a rule for that range allows it"
            }
            Self::OwnAddress => {
                "the address is one of the host; only a rule for it alone allows it"
            }
            Self::NameNotAllowed => "no rule allows this name at this port",
            Self::NoName => "the client showed no name (SNI or Host), and rules are by name",
            Self::EncryptedHello => "the TLS hello hides its name, and rules are by name",
            Self::Quic => {
                "UDP at this port (QUIC) hides its name, and rules are by name; TCP is judged"
            }
            Self::Protocol => {
                "a rule allows the other of TCP and UDP only; a port without a protocol is for TCP"
            }
            Self::TooMany => "too many are open at once",
            Self::RequestRefused => "the request to a host with secrets was refused",
            Self::ServerTls => "TLS with the server failed",
        }
    }
}

impl Policy {
    /// Checks every rule of a document.
    pub fn new(document: &PolicyDocument) -> Result<Self, PolicyError> {
        let PolicyDocument { allow, allow_host, deny, names_into, named_ports, allow_ech } =
            document;
        let lists = [allow, allow_host, deny, names_into];
        let count = lists.iter().map(|list| list.len()).sum::<usize>() + named_ports.len();
        if count > RULES_MAX {
            return Err(PolicyError::TooMany { count });
        }
        let networks = allow.iter().map(|text| Rule::network(text));
        let hosts = allow_host.iter().map(|text| Rule::host(text));
        let (named_ports, allow_ech) = (named_ports.clone(), *allow_ech);
        let mut policy = Self { named_ports, allow_ech, ..Self::default() };
        for rule in networks.chain(hosts) {
            add(&mut policy.allow, rule?);
        }
        for text in deny {
            add(&mut policy.deny, Rule::any(text)?);
        }
        policy.names_into =
            names_into.iter().map(|text| cidr(text, text)).collect::<Result<_, _>>()?;
        policy.allow.iter().try_for_each(|rule| policy.check_shows_name(rule))?;
        Ok(policy)
    }

    /// Adds a rule that allows, in place of the same rule that denies.
    pub fn allow(&mut self, rule: Rule) -> Result<(), PolicyError> {
        self.check_shows_name(&rule)?;
        self.deny.retain(|other| other.target != rule.target);
        add(&mut self.allow, rule);
        self.check_count()
    }

    /// Adds a rule that denies, in place of the same rule that allows.
    pub fn deny(&mut self, rule: Rule) -> Result<(), PolicyError> {
        self.allow.retain(|other| other.target != rule.target);
        add(&mut self.deny, rule);
        self.check_count()
    }

    fn check_count(&self) -> Result<(), PolicyError> {
        let count = self.allow.len() + self.deny.len();
        if count > RULES_MAX { Err(PolicyError::TooMany { count }) } else { Ok(()) }
    }

    /// Refuses a rule that allows a name where the name cannot be seen.
    fn check_shows_name(&self, rule: &Rule) -> Result<(), PolicyError> {
        match &rule.target {
            Target::Host {
                port: Some(RulePort { number, protocol: Some(Protocol::Udp) }), ..
            } if self.is_named_port(*number) => {
                Err(PolicyError::Quic { rule: rule.text.to_string(), port: *number })
            }
            _ => Ok(()),
        }
    }

    /// Returns the texts of the rules that allow, and of those that deny.
    pub fn rules(&self) -> (impl Iterator<Item = &Rc<str>>, impl Iterator<Item = &Rc<str>>) {
        (self.allow.iter().map(|rule| &rule.text), self.deny.iter().map(|rule| &rule.text))
    }

    /// Returns whether a client at this port shows a name before the server says anything.
    pub fn is_named_port(&self, port: u16) -> bool {
        NAMED_PORTS.contains(&port) || self.named_ports.contains(&port)
    }

    /// Returns whether a name can be denied while its address is allowed.
    pub fn denies_names(&self) -> bool {
        self.deny.iter().any(|rule| matches!(rule.target, Target::Host { .. }))
    }

    /// Returns whether UDP to an address would hide a name that is judged over TCP, and no rule
    /// allows that in so many words.
    pub fn hides_name(&self, address: IpAddr, port: Port) -> bool {
        self.is_quic(port) && !self.allow.iter().any(|rule| rule.names_udp(address, port.number))
    }

    /// Judges a connection to an address of which no name is known.
    pub fn judge_address(&self, address: IpAddr, port: Port) -> Verdict {
        if let Some(denial) = self.denied_address(address, port) {
            return Verdict::Denied(denial);
        }
        let special = ranges::special_range(address);
        let find = |port: Port| {
            self.allow.iter().find(|rule| match &rule.target {
                Target::All => special.is_none(),
                Target::Network { cidr, .. } => {
                    rule.allows_address(address, port) && (special.is_none() || cidr.is_special())
                }
                Target::Host { .. } => false,
            })
        };
        match find(port) {
            Some(_) if self.denies_names() && self.hides_name(address, port) => {
                Verdict::Denied(Denial::Quic)
            }
            Some(rule) => Verdict::Allowed(rule.text.clone()),
            None if find(port.of_other_protocol()).is_some() => Verdict::Denied(Denial::Protocol),
            None if special.is_some() => Verdict::Denied(Denial::SpecialRange),
            None => Verdict::Denied(Denial::NoRule),
        }
    }

    /// Judges a name, at one port or, for a DNS question, at any.
    pub fn judge_name(&self, name: &str, port: Option<Port>) -> Verdict {
        if self.deny.iter().any(|rule| rule.denies_name(name, port)) {
            return Verdict::Denied(Denial::DeniedByRule);
        }
        let find = |port: Option<Port>| self.allow.iter().find(|rule| rule.allows_name(name, port));
        let other = port.map(Port::of_other_protocol);
        match (find(port), other.and_then(|other| find(Some(other)))) {
            (Some(rule), _) => Verdict::Allowed(rule.text.clone()),
            (None, Some(_)) if port.is_some_and(|port| self.is_quic(port)) => {
                Verdict::Denied(Denial::Quic)
            }
            (None, Some(_)) => Verdict::Denied(Denial::Protocol),
            (None, None) => Verdict::Denied(Denial::NameNotAllowed),
        }
    }

    fn is_quic(&self, port: Port) -> bool {
        port.protocol == Protocol::Udp && self.is_named_port(port.number)
    }

    /// Judges an address that an allowed name was resolved to, at one port or at any.
    pub fn judge_resolved(&self, address: IpAddr, port: Option<Port>) -> Result<(), Denial> {
        if let Some(denial) = port.and_then(|port| self.denied_address(address, port)) {
            return Err(denial);
        }
        if ranges::special_range(address).is_none() {
            return Ok(());
        }
        let named = self.names_into.iter().any(|cidr| cidr.contains(address) && cidr.is_special());
        let allowed = self.allow.iter().any(|rule| match &rule.target {
            Target::Network { cidr, port: at } => {
                let fits = match (at, port) {
                    (Some(at), Some(port)) => at.allows(port),
                    _ => true,
                };
                cidr.contains(address) && cidr.is_special() && fits
            }
            _ => false,
        });
        if named || allowed { Ok(()) } else { Err(Denial::SpecialRange) }
    }

    /// Returns whether rules open an address of the host itself at a port: a rule for that address
    /// alone, or one for loopback.
    pub fn opens_own_address(&self, address: IpAddr, port: Port) -> bool {
        let names = |cidr: Cidr| {
            cidr.contains(address) && (cidr.is_host() || address.to_canonical().is_loopback())
        };
        let by_rule = self.allow.iter().any(|rule| match rule.target {
            Target::Network { cidr, .. } => names(cidr) && rule.allows_address(address, port),
            _ => false,
        });
        by_rule || self.names_into.iter().any(|cidr| names(*cidr))
    }

    fn denied_address(&self, address: IpAddr, port: Port) -> Option<Denial> {
        let denied = |rule: &Rule| rule.denies_address(address, port);
        self.deny.iter().any(denied).then_some(Denial::DeniedByRule)
    }
}

fn add(rules: &mut Vec<Rule>, rule: Rule) {
    if !rules.contains(&rule) {
        rules.push(rule);
    }
}

#[cfg(test)]
mod tests;
