//! The command line of `pvmm-egress`, validated.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;

use smoltcp::wire::EthernetAddress;

use crate::connection::ConnectionKey;
use crate::policy::{Policy, PolicyDocument, PolicyError};
use crate::secrets::Authorities;

pub const HELP: &str = "\
The process through which one sandbox reaches the network.

Usage: pvmm-egress --frames-fd N [OPTIONS]

Link:
  --frames-fd N         SOCK_SEQPACKET Unix socket to the guest's network card; each message is a
                        12-byte virtio header, all zero, and an Ethernet frame
  --guest-ip ADDRESS    the guest's address [10.0.2.15]
  --guest-mac MAC       the guest's hardware address [that of its first frame]
  --gateway-ip ADDRESS  the gateway and DNS server of the guest [10.0.2.1]
  --inherited P=IP:PORT a connection from the guest's port P that was open in the VM that the guest
                        was copied from; it is reset in the guest

Policy (nothing is allowed without a rule):
  --allow RULE          CIDR[:port[/tcp|/udp]], or 'all' for every public address and name; without
                        a port it is for TCP and UDP, and a port without a protocol is one of TCP
  --allow-host RULE     name[:port[/udp]], or '*.name[:port[/udp]]' for the names below it; UDP
                        shows no name, so it takes /udp, and is never for ports 80 and 443
  --deny RULE           either form, for TCP and UDP; comes before every rule that allows
  --names-into CIDR     a private range that allowed names may lead to
  --named-port PORT     a port beside 80 and 443 at which clients show a name first (TLS, HTTP)
  --allow-ech           judge an encrypted TLS hello by its outer name; browsers send one
  --policy FILE         JSON: {\"allow\": [], \"allow_host\": [], \"deny\": [], \"names_into\": [],
                        \"named_ports\": [], \"allow_ech\": false}; flags add to it

Host:
  --resolver IP:PORT    upstream DNS resolver, up to three times [those of /etc/resolv.conf]
  --control-fd N        listening Unix socket for control clients; a JSON object on each line
  --log-fd N            audit log, a JSON line for each decision
  --secrets-fd N        document of secrets: the values that stand for placeholders in requests
  -h, --help            print this text
  -V, --version         print the version

Examples:
  pvmm-egress --frames-fd 3 --allow-host pypi.org:443 --allow-host '*.pythonhosted.org:443'
  pvmm-egress --frames-fd 3 --control-fd 4 --allow all --deny 203.0.113.0/24
  pvmm-egress --frames-fd 3 --allow 192.0.2.1:53/udp --allow-host ntp.example.com:123/udp

Exit status: 0 when the guest's card is gone, 1 on a failure of the host, 2 on a wrong command line
or policy.
";

/// A parsed command line.
#[derive(Debug)]
pub enum EgressCommand {
    Help,
    Version,
    Run(Box<Options>),
}

/// The orders of a process.
#[derive(Debug)]
pub struct Options {
    pub frames_fd: RawFd,
    pub control_fd: Option<RawFd>,
    pub log_fd: Option<RawFd>,
    /// The document of the secrets (`SecretsDocument`).
    pub secrets_fd: Option<RawFd>,
    /// The authorities that hosts with secrets are verified by; those of this host if not given.
    pub authorities: Option<Authorities>,
    pub guest_ip: Ipv4Addr,
    pub guest_mac: Option<EthernetAddress>,
    pub gateway_ip: Ipv4Addr,
    /// Connections that were open in the VM that the guest was copied from.
    pub inherited: Vec<ConnectionKey>,
    /// Upstream resolvers; if there are none, /etc/resolv.conf names them.
    pub resolvers: Vec<SocketAddr>,
    pub policy: Policy,
}

/// Why a command line is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum ArgumentError {
    #[error("{flag} is unknown; see --help")]
    Unknown { flag: String },
    #[error("{flag} needs a value; see --help")]
    NoValue { flag: String },
    #[error("{flag} {value:?} is not {form}")]
    Value { flag: &'static str, value: String, form: &'static str },
    #[error("--frames-fd is missing; it takes the number of the socket to the guest's card")]
    NoFrames,
    #[error("descriptor {number} is given twice; each flag takes its own")]
    SameDescriptor { number: RawFd },
    #[error("--guest-ip and --gateway-ip are both {address}; they must differ")]
    SameAddress { address: Ipv4Addr },
    #[error("--policy {path}: {message}")]
    PolicyFile { path: String, message: String },
    #[error("{0}")]
    Policy(#[from] PolicyError),
}

const DESCRIPTOR: &str = "the number of an inherited descriptor, 3 or more";
const ADDRESS: &str = "an IPv4 address such as 10.0.2.15";
const MAC: &str = "a hardware address such as 02:00:00:00:00:01";
const PORT: &str = "a port from 1 to 65535";
const INHERITED: &str = "a port of the guest, an address and a port such as 40000=9.9.9.9:443";
const RESOLVER: &str = "an address and port such as 9.9.9.9:53";

/// Parses the arguments after the program's name. The policy file is read.
pub fn parse(arguments: impl Iterator<Item = String>) -> Result<EgressCommand, ArgumentError> {
    let mut arguments = arguments.peekable();
    let (mut frames_fd, mut control_fd, mut log_fd) = (None, None, None);
    let (mut guest_ip, mut gateway_ip) = (Ipv4Addr::new(10, 0, 2, 15), Ipv4Addr::new(10, 0, 2, 1));
    let (mut guest_mac, mut resolvers, mut secrets_fd) = (None, Vec::new(), None);
    let (mut document, mut inherited) = (PolicyDocument::default(), Vec::new());
    let mut file = None;
    while let Some(argument) = arguments.next() {
        let (flag, attached) = match argument.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => (flag, Some(value.to_owned())),
            _ => (argument.as_str(), None),
        };
        let mut value = || {
            let value = attached.clone().or_else(|| arguments.next());
            value.ok_or_else(|| ArgumentError::NoValue { flag: flag.to_owned() })
        };
        match flag {
            "-h" | "--help" => return Ok(EgressCommand::Help),
            "-V" | "--version" => return Ok(EgressCommand::Version),
            "--frames-fd" => frames_fd = Some(descriptor("--frames-fd", value()?)?),
            "--control-fd" => control_fd = Some(descriptor("--control-fd", value()?)?),
            "--log-fd" => log_fd = Some(descriptor("--log-fd", value()?)?),
            "--secrets-fd" => secrets_fd = Some(descriptor("--secrets-fd", value()?)?),
            "--guest-ip" => guest_ip = read("--guest-ip", value()?, ADDRESS)?,
            "--gateway-ip" => gateway_ip = read("--gateway-ip", value()?, ADDRESS)?,
            "--guest-mac" => guest_mac = Some(hardware_address(value()?)?),
            "--inherited" => inherited.push(read("--inherited", value()?, INHERITED)?),
            "--resolver" => resolvers.push(read("--resolver", value()?, RESOLVER)?),
            "--allow" => document.allow.push(value()?),
            "--allow-host" => document.allow_host.push(value()?),
            "--deny" => document.deny.push(value()?),
            "--names-into" => document.names_into.push(value()?),
            "--named-port" => document.named_ports.push(read("--named-port", value()?, PORT)?),
            "--allow-ech" => document.allow_ech = true,
            "--policy" => file = Some(PathBuf::from(value()?)),
            _ => return Err(ArgumentError::Unknown { flag: flag.to_owned() }),
        }
    }
    if let Some(file) = file {
        add(&mut document, read_policy(&file)?);
    }
    let frames_fd = frames_fd.ok_or(ArgumentError::NoFrames)?;
    let mut taken = vec![frames_fd];
    for number in [control_fd, log_fd, secrets_fd].into_iter().flatten() {
        if taken.contains(&number) {
            return Err(ArgumentError::SameDescriptor { number });
        }
        taken.push(number);
    }
    if guest_ip == gateway_ip {
        return Err(ArgumentError::SameAddress { address: guest_ip });
    }
    let policy = Policy::new(&document)?;
    let options = Options {
        frames_fd,
        control_fd,
        log_fd,
        secrets_fd,
        authorities: None,
        guest_ip,
        guest_mac,
        gateway_ip,
        inherited,
        resolvers,
        policy,
    };
    Ok(EgressCommand::Run(Box::new(options)))
}

fn read<T: FromStr>(
    flag: &'static str,
    value: String,
    form: &'static str,
) -> Result<T, ArgumentError> {
    value.parse().map_err(|_| ArgumentError::Value { flag, value, form })
}

fn descriptor(flag: &'static str, value: String) -> Result<RawFd, ArgumentError> {
    match value.parse() {
        Ok(number) if number > 2 => Ok(number),
        _ => Err(ArgumentError::Value { flag, value, form: DESCRIPTOR }),
    }
}

fn hardware_address(value: String) -> Result<EthernetAddress, ArgumentError> {
    let mut bytes = [0; 6];
    let mut parts = value.split(':');
    let byte = |part: &str| {
        let plain = part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
        u8::from_str_radix(part, 16).ok().filter(|_| plain)
    };
    let read = bytes.iter_mut().all(|to| match parts.next().and_then(byte) {
        Some(from) => {
            *to = from;
            true
        }
        None => false,
    });
    let address = EthernetAddress(bytes);
    if !read || parts.next().is_some() || !address.is_unicast() {
        return Err(ArgumentError::Value { flag: "--guest-mac", value, form: MAC });
    }
    Ok(address)
}

fn read_policy(path: &std::path::Path) -> Result<PolicyDocument, ArgumentError> {
    let failed =
        |message: String| ArgumentError::PolicyFile { path: path.display().to_string(), message };
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| failed(error.to_string()))
}

fn add(document: &mut PolicyDocument, file: PolicyDocument) {
    document.allow.extend(file.allow);
    document.allow_host.extend(file.allow_host);
    document.deny.extend(file.deny);
    document.names_into.extend(file.names_into);
    document.named_ports.extend(file.named_ports);
    document.allow_ech |= file.allow_ech;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Result<EgressCommand, ArgumentError> {
        parse(words.iter().map(|word| (*word).to_owned()))
    }

    fn refused(words: &[&str]) -> String {
        let words = [&["--frames-fd", "3"], words].concat();
        parsed(&words).unwrap_err().to_string()
    }

    #[test]
    fn command_line_of_every_flag_is_read() {
        let words = [
            "--frames-fd=3",
            "--control-fd",
            "4",
            "--log-fd",
            "5",
            "--guest-ip",
            "10.9.0.2",
            "--gateway-ip",
            "10.9.0.1",
            "--guest-mac",
            "02:00:00:00:00:0A",
            "--resolver",
            "9.9.9.9:53",
            "--allow",
            "1.1.1.1:443/tcp",
            "--allow-host",
            "*.example.com",
            "--deny",
            "x.example.com",
            "--names-into",
            "10.0.0.0/8",
            "--named-port",
            "8443",
            "--allow-ech",
        ];
        let EgressCommand::Run(options) = parsed(&words).unwrap() else { panic!("no run") };
        assert_eq!((options.frames_fd, options.control_fd, options.log_fd), (3, Some(4), Some(5)));
        assert_eq!(options.guest_mac, Some(EthernetAddress([2, 0, 0, 0, 0, 10])));
        assert!(options.policy.judge_name("a.example.com", None).is_allowed());
        assert!(!options.policy.judge_name("x.example.com", None).is_allowed());
    }

    #[test]
    fn wrong_command_line_names_the_flag_and_the_fix() {
        assert!(parsed(&[]).unwrap_err().to_string().contains("--frames-fd is missing"));
        assert!(refused(&["--frames-fd", "1"]).contains("3 or more"));
        assert!(refused(&["--log-fd", "3"]).contains("given twice"));
        assert!(refused(&["--guest-ip", "x"]).contains("10.0.2.15"));
        assert!(refused(&["--guest-ip", "10.0.2.1"]).contains("must differ"));
        assert!(refused(&["--guest-mac", "01:00:00:00:00:01"]).contains("--guest-mac"));
        assert!(refused(&["--guest-mac", "02:00:00:00:00"]).contains("--guest-mac"));
        assert!(refused(&["--resolver", "9.9.9.9"]).contains("9.9.9.9:53"));
        for wrong in ["9.9.9.9:443", "x=9.9.9.9:443", "1=9.9.9.9", "70000=9.9.9.9:443"] {
            assert!(refused(&["--inherited", wrong]).contains("40000=9.9.9.9:443"));
        }
        assert!(refused(&["--allow"]).contains("needs a value"));
        assert!(refused(&["--alow", "all"]).contains("--alow is unknown"));
        assert!(refused(&["--allow", "10.0.0.1/8"]).contains("write 10.0.0.0/8"));
    }

    #[test]
    fn policy_file_is_read_and_added_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("policy.json");
        std::fs::write(&path, r#"{"allow_host": ["a.example"]}"#).unwrap();
        let path = path.to_str().unwrap();
        let words = ["--frames-fd", "3", "--policy", path, "--allow-host", "b.example"];
        let EgressCommand::Run(options) = parsed(&words).unwrap() else { panic!("no run") };
        for name in ["a.example", "b.example"] {
            assert!(options.policy.judge_name(name, None).is_allowed());
        }
        std::fs::write(path, r#"{"hosts": []}"#).unwrap();
        assert!(refused(&["--policy", path]).contains("hosts"));
        assert!(refused(&["--policy", "/nonexistent"]).contains("/nonexistent"));
    }
}
