//! The options of the server, as the command line gives them.
//!
//! Separate from the server, because the command line and the tests build them without it.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use pvmm::CpuBaseline;

use crate::json_log::JsonLog;
use crate::traces::Collector;

/// The address that the server listens on by default.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:8088";

/// A place where the server accepts connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A TCP address. Port 0 takes any free port.
    Tcp(SocketAddr),
    /// A Unix socket, which is created with mode 0600.
    Unix(PathBuf),
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if !path.is_empty() {
                Ok(Self::Unix(path.into()))
            } else {
                Err("write a path after 'unix:'".to_owned())
            };
        }
        let address = text.parse().map_err(|_| "write ADDR:PORT, or unix:PATH".to_owned())?;
        Ok(Self::Tcp(address))
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The files of the server's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain, as PEM.
    pub cert: PathBuf,
    /// The private key, as PEM.
    pub key: PathBuf,
}

/// Bounds on the use of the host. A request beyond one of them is refused with its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most sandboxes of one token that run at a time.
    pub sandboxes: u32,
    /// The most guest memory of the running sandboxes of one token, in MiB.
    pub memory_mib: u64,
    /// The most creates and forks of one token in a second.
    pub creates_per_second: u32,
    /// Memory of the host that stays free, in MiB.
    pub reserve_mib: u64,
    /// Disk space of the data directory that stays free, in MiB.
    pub reserve_disk_mib: u64,
    /// The time without a request after which a persistent sandbox hibernates.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sandboxes: 256,
            memory_mib: 1 << 20,
            creates_per_second: 50,
            reserve_mib: 256,
            reserve_disk_mib: 256,
            idle: Duration::from_secs(300),
        }
    }
}

/// The configuration of the server.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The places to listen on, beside the sockets that were passed to this process. Without both,
    /// [`DEFAULT_LISTEN`].
    pub listen: Vec<Listen>,
    /// A bearer token that is accepted; without one, a token is made and kept.
    pub token: Option<String>,
    /// The certificate for TLS on TCP addresses.
    pub tls: Option<TlsFiles>,
    /// The directory of the database, of snapshots and of the audit log.
    pub data_dir: PathBuf,
    /// Whether a directory of its own, which goes with the server, is used beside a data directory
    /// that another server has.
    pub own_dir_if_taken: bool,
    /// Bounds on the use of the host.
    pub limits: Limits,
    /// The processor features that guests of templates are offered. It must have a name, which a
    /// bake is given.
    pub cpu: CpuBaseline,
    /// Rules for the network of sandboxes whose request has none; empty for no network.
    pub default_egress: Vec<String>,
    /// The number of processes that wait for the next sandboxes.
    pub shells: usize,
    /// Whether the server prints one JSON line when it is ready, and ends when its standard input
    /// closes.
    pub with_parent: bool,
    /// The log in which each request is a line, if there is one.
    pub json_log: Option<JsonLog>,
    /// The collector of traces, if there is one, and the name of this server in them.
    pub traces: Option<(Collector, String)>,
    /// Whether the server says on standard error where it listens.
    pub print_address: bool,
}

/// The configuration of one conversation over standard input and output.
#[derive(Clone, Debug)]
pub struct McpOptions {
    /// The template of sandboxes whose call names none.
    pub template: String,
    /// The number of vCPUs; the template's by default.
    pub cpus: Option<u32>,
    /// The guest memory in MiB; the template's by default.
    pub memory_mib: Option<u64>,
    /// How long a sandbox lives without a call.
    pub ttl: Duration,
    /// Rules for the network of sandboxes; empty for no network.
    pub egress: Vec<String>,
    /// A path beside which a directory is made that goes with the conversation.
    pub data_dir: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_from_text_is_an_address_or_a_path() {
        assert_eq!("unix:/run/a".parse(), Ok(Listen::Unix("/run/a".into())));
        assert!(matches!(DEFAULT_LISTEN.parse(), Ok(Listen::Tcp(_))));
        for text in ["", "unix:", "localhost", "1.2.3.4", "1.2.3.4:99999"] {
            assert!(text.parse::<Listen>().is_err(), "{text}");
        }
    }
}
