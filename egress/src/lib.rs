//! The process through which one sandbox reaches the network.
//!
//! The guest's network card is one end of a packet socket, this process is the other: the guest's
//! gateway, its DNS server, and the far end of each of its TCP connections. No root, no tap and no
//! rule in the host's kernel is needed. Nothing of the guest's frames reaches the network: a
//! connection that the policy allows is made again by this process, and the payload of a datagram
//! over UDP leaves from a socket of this process.
//!
//! A name is judged twice, when it is asked for and when the client shows it (SNI, Host), and the
//! process dials an address that its own resolver returned for the name. A forged name or a forged
//! address therefore leads nowhere that the name's owner does not serve. The first request's name
//! counts; a later request on the same connection reaches the same server.
//!
//! | file | contents |
//! | --- | --- |
//! | `arguments.rs` | the command line |
//! | `policy.rs`, `policy/rule.rs` | judgements of addresses and names; the rules |
//! | `ranges.rs` | networks, and the ranges that are closed to all but a rule for them |
//! | `names.rs` | the names that were resolved, and where they led |
//! | `hello.rs` | the name in a client's first bytes |
//! | `frame.rs`, `reply.rs` | frames of the guest, and packets that the gateway writes itself |
//! | `link.rs` | the packet socket to the guest's card |
//! | `connection.rs`, `connections.rs` | TCP connections: stages, table, stack |
//! | `associations.rs` | UDP: table of associations and their sockets |
//! | `inherited.rs` | connections of the VM that the guest was copied from, and their end |
//! | `secrets.rs`, `tls.rs` | placeholders and values; certificates of hosts with secrets |
//! | `interception.rs`, `requests.rs` | connections and requests to such hosts |
//! | `dns.rs`, `resolver.rs` | DNS messages; questions to upstream resolvers |
//! | `counters.rs`, `audit.rs`, `rate.rs` | what was used and denied, the log, and its rate |
//! | `control.rs`, `control_server.rs` | the control protocol and its sockets |
//! | `gateway.rs` | what happens to each frame, question and connection |
//! | `gateway/datagrams.rs` | what happens to each datagram |
//! | `event_loop.rs` | the wait for the next event |
//! | `confine.rs`, `seccomp.rs` | what the process gives up before its first frame |
//! | `token.rs`, `sys.rs` | names of watched descriptors; system calls |

pub mod arguments;
mod associations;
mod audit;
mod confine;
mod connection;
mod connections;
mod control;
mod control_server;
mod counters;
mod dns;
mod event_loop;
mod frame;
mod gateway;
mod hello;
mod inherited;
mod interception;
mod link;
mod names;
pub mod policy;
pub mod ranges;
mod rate;
mod reply;
mod requests;
mod resolver;
mod seccomp;
pub mod secrets;
mod sys;
mod tls;
mod token;

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, RawFd};
use std::os::unix::net::UnixListener;
use std::time::Instant;

pub use smoltcp::wire::EthernetAddress;

pub use arguments::Options;
pub use confine::ConfineError;
pub use connection::ConnectionKey;
use control_server::ControlServer;
use event_loop::Parts;
use frame::Ends;
use inherited::Inherited;
use link::Link;
use resolver::Resolver;
pub use seccomp::SeccompError;
use secrets::{Authorities, Secrets, SecretsDocument, SecretsError};

/// The gateway's hardware address; the second bit of its first byte says that nobody was assigned
/// it.
const GATEWAY_MAC: EthernetAddress = EthernetAddress([0x02, 0x70, 0x76, 0x6d, 0x6d, 0x01]);
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Why the process cannot do its work.
#[derive(Debug, thiserror::Error)]
pub enum EgressError {
    #[error("{flag} {number}: no such descriptor was inherited")]
    Descriptor { flag: &'static str, number: RawFd },
    #[error("--frames-fd {number}: not a Unix socket of type SOCK_SEQPACKET")]
    NotPackets { number: RawFd },
    #[error("{act}: {source}")]
    Host { act: &'static str, source: io::Error },
    #[error("{0}: {cause}", cause = std::error::Error::source(.0).map(ToString::to_string).unwrap_or_default())]
    Confine(ConfineError),
    #[error("--secrets-fd: {0}")]
    Secrets(#[from] SecretsError),
    #[error("cannot filter system calls: {0}")]
    Seccomp(#[from] SeccompError),
}

/// Takes the descriptors, confines the process, and carries traffic until the guest's card is gone.
pub fn run(options: Options) -> Result<(), EgressError> {
    let Options { frames_fd, guest_ip, guest_mac, gateway_ip, policy, .. } = options;
    let frames = inherit("--frames-fd", frames_fd)?;
    if !sys::is_packet_socket(frames.as_fd()) {
        return Err(EgressError::NotPackets { number: frames_fd });
    }
    let control = options.control_fd.map(|number| inherit("--control-fd", number)).transpose()?;
    let control = control.map(|fd| ControlServer::new(UnixListener::from(fd))).transpose();
    let control = control.map_err(host("cannot use --control-fd"))?;
    let log = options.log_fd.map(|number| inherit("--log-fd", number)).transpose()?;
    if let Some(log) = &log {
        sys::set_nonblocking(log.as_fd()).map_err(host("cannot use --log-fd"))?;
    }
    let secrets = match options.secrets_fd {
        None => Secrets::default(),
        Some(number) => {
            let document = SecretsDocument::read(inherit("--secrets-fd", number)?.into())?;
            let authorities = options.authorities.unwrap_or_else(Authorities::of_host);
            Secrets::new(document, authorities)?
        }
    };
    let resolvers = if options.resolvers.is_empty() { host_resolvers() } else { options.resolvers };
    let poller = sys::Poller::new().map_err(host("cannot watch descriptors"))?;
    confine::confine().map_err(EgressError::Confine)?;
    // Last: the steps before use calls that the filter refuses.
    seccomp::apply()?;
    let ends = Ends { guest_mac, guest_ip, gateway_mac: GATEWAY_MAC, gateway_ip };
    let link = Link::new(frames, ends);
    let inherited = Inherited::new(options.inherited, &ends, Instant::now());
    let (resolver, log) = (Resolver::new(resolvers), log.map(File::from));
    event_loop::run(Parts { poller, link, inherited, policy, secrets, resolver, control, log })
        .map_err(host("cannot wait for events"))
}

/// Returns the resolvers of this host. Without any, names cannot be resolved; addresses can still
/// be reached.
pub fn host_resolvers() -> Vec<SocketAddr> {
    resolver::upstreams_of(&std::fs::read_to_string(RESOLV_CONF).unwrap_or_default())
}

fn inherit(flag: &'static str, number: RawFd) -> Result<std::os::fd::OwnedFd, EgressError> {
    sys::inherit(number).map_err(|_| EgressError::Descriptor { flag, number })
}

fn host(act: &'static str) -> impl FnOnce(io::Error) -> EgressError {
    move |source| EgressError::Host { act, source }
}
