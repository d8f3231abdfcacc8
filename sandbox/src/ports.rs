//! Ports of the host that are forwarded into a guest: parsing, binding and serving them.
//!
//! Shared by `pvmm port`, `run -p` and the monitor process of a detached VM. Listeners are bound
//! before anything is created, so that a port in use is a usage error and leaves no half-made VM.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, AgentError, Forward};

use crate::failure::{self, Failure};
use crate::guest_agent;

/// The interval of checks whether the guest is still there.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How long a ping may take; a paused guest does not answer, but is still there.
const PING_TIME: Duration = Duration::from_secs(1);
/// The shortest time between two remarks about refused clients.
const REMARK_EVERY: Duration = Duration::from_secs(5);

/// A parsed `[ADDRESS:]HOST:GUEST`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSpec {
    pub host: SocketAddr,
    pub guest: u16,
}

/// Parses `8080:80`, `0.0.0.0:8080:80`, `[::1]:8080:80`, `0:80` (any free port) or `80` (for both).
pub fn port_spec(text: &str) -> Result<PortSpec, String> {
    const SHAPE: &str = "write HOST:GUEST, as in 8080:80, or ADDRESS:HOST:GUEST";
    let number = |text: &str| {
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            text.parse::<u16>().map_err(|_| format!("{SHAPE}; a port is at most 65535"))
        } else {
            Err(SHAPE.to_owned())
        }
    };
    let (rest, guest) = text.rsplit_once(':').unwrap_or((text, text));
    let guest = number(guest)?;
    if guest == 0 {
        return Err(format!("{SHAPE}; a port in the guest is from 1 to 65535"));
    }
    let (address, host) = match rest.rsplit_once(':') {
        Some((address, host)) => (address_of(address)?, host),
        None => (IpAddr::V4(Ipv4Addr::LOCALHOST), rest),
    };
    Ok(PortSpec { host: SocketAddr::new(address, number(host)?), guest })
}

fn address_of(text: &str) -> Result<IpAddr, String> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    match bare.parse() {
        // Without brackets the end of an IPv6 address and the port are ambiguous.
        Ok(IpAddr::V6(_)) if bare.len() == text.len() => {
            Err(format!("write an IPv6 address in brackets: [{bare}]"))
        }
        Ok(address) => Ok(address),
        Err(_) if bare == "localhost" => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        Err(_) => Err(format!("'{bare}' is not an IP address; write one, as in 127.0.0.1:8080:80")),
    }
}

/// A bound port of the host, and the guest port that it is forwarded to.
#[derive(Debug)]
pub struct BoundPort {
    listener: TcpListener,
    host: SocketAddr,
    guest: u16,
}

impl fmt::Display for BoundPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}->{}", self.host, self.guest)
    }
}

/// Binds all ports, or fails and binds none.
pub fn bind(specs: &[PortSpec]) -> Result<Vec<BoundPort>, Failure> {
    specs.iter().map(bind_one).collect()
}

fn bind_one(spec: &PortSpec) -> Result<BoundPort, Failure> {
    let bound = TcpListener::bind(spec.host)
        .and_then(|listener| listener.local_addr().map(|host| (listener, host)));
    match bound {
        Ok((listener, host)) => Ok(BoundPort { listener, host, guest: spec.guest }),
        Err(error) => {
            let why = failure::io_text(&error);
            let failure = Failure::usage(format!("cannot listen on {}: {why}", spec.host));
            Err(match error.kind() {
                io::ErrorKind::AddrInUse => failure
                    .hint(format!("choose another port, or 0:{} for any free one", spec.guest)),
                _ => failure,
            })
        }
    }
}

/// Forwards the ports into the VM until `stop`, which waits for the given time, returns true.
/// Reconnects at `vsock` when the connection to the agent is reset. Fails when the VM has ended.
pub fn keep(
    vsock: &Path,
    is_alive: impl Fn() -> bool,
    ports: &[BoundPort],
    remark: fn(&str),
    mut stop: impl FnMut(Duration) -> bool,
) -> Result<(), Failure> {
    let remarks = Arc::new(Remarks { last: Mutex::new(None), remark });
    loop {
        let agent = match guest_agent::connect_at(vsock, guest_agent::PATIENCE) {
            Ok(agent) => agent,
            Err(_) if !is_alive() => return Err(Failure::fault("the VM has ended")),
            Err(error) => return Err(guest_agent::refuse(error)),
        };
        let forwards: Result<Vec<Forward>, Failure> =
            ports.iter().map(|port| forward(&agent, port, &remarks)).collect();
        let _forwards = forwards?;
        while is_there(&agent) {
            if stop(LOOK_EVERY) {
                return Ok(());
            }
        }
    }
}

/// Whether the connection to the agent still stands; a slow answer counts as yes.
fn is_there(agent: &Agent) -> bool {
    !matches!(agent.ping(Instant::now() + PING_TIME), Err(AgentError::Lost(_)))
}

fn forward(agent: &Agent, port: &BoundPort, remarks: &Arc<Remarks>) -> Result<Forward, Failure> {
    let listener = port.listener.try_clone()?;
    let (remarks, guest) = (Arc::clone(remarks), port.guest);
    let on_refused = move |error: &AgentError| remarks.refused(guest, error);
    agent.forward(listener, port.guest, on_refused).map_err(guest_agent::refuse)
}

/// Reports refused clients, at a limited rate.
struct Remarks {
    last: Mutex<Option<Instant>>,
    remark: fn(&str),
}

impl Remarks {
    fn refused(&self, guest: u16, error: &AgentError) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|at| at.elapsed() < REMARK_EVERY) {
            return;
        }
        *last = Some(Instant::now());
        let why = error.errno().map_or_else(|| error.to_string(), failure::errno_text);
        (self.remark)(&format!("a client was refused: port {guest} in the guest: {why}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_spec_in_every_form_is_read() {
        for (text, host, guest) in [
            ("8080:80", "127.0.0.1:8080", 80),
            ("80", "127.0.0.1:80", 80),
            ("0:80", "127.0.0.1:0", 80),
            ("0.0.0.0:8080:80", "0.0.0.0:8080", 80),
            ("localhost:1:2", "127.0.0.1:1", 2),
            ("[::1]:8080:65535", "[::1]:8080", 65535),
        ] {
            let spec = PortSpec { host: host.parse().unwrap(), guest };
            assert_eq!(port_spec(text), Ok(spec), "{text}");
        }
    }

    #[test]
    fn port_spec_that_makes_no_sense_is_refused() {
        let wrong =
            ["", ":", "0", "8080:0", "a:80", "80:b", "65536:80", "80:65536", "-1:80", "+1:80"];
        for text in wrong.into_iter().chain(["::1:80:80", "host.example:1:2", "1:2:3:4", " 80:80"])
        {
            assert!(port_spec(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bind_of_a_taken_port_names_it_and_a_way_out() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let spec = PortSpec { host: taken.local_addr().unwrap(), guest: 80 };
        let failure = bind(std::slice::from_ref(&spec)).unwrap_err();
        assert_eq!(failure.code, failure::USAGE);
        assert!(failure.message.contains(&spec.host.to_string()), "{failure:?}");
        assert!(failure.hint.unwrap().contains("0:80"));
    }
}
