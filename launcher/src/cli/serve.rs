//! Arguments of `pvmm serve`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use pvmm_service::{DEFAULT_LISTEN, Listen};

use super::TEMPLATE;
use crate::args;

/// Serve sandboxes over HTTP, for agents and their SDKs
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm serve                                        on 127.0.0.1:8088, with a token that is kept
  pvmm serve --listen unix:/run/user/1000/pvmm.sock
  pvmm serve --listen 0.0.0.0:8443 --tls-cert cert.pem --tls-key key.pem
  pvmm serve --allow pypi.org --allow '*.example.com:443'

PANDASTACK_API=http://127.0.0.1:8088 PANDASTACK_API_KEY=TOKEN lets programs that were written for PandaStack use
it. Sandboxes go on when the server ends, and the next server takes them up.
")]
pub struct Serve {
    /// Where to listen, ADDR:PORT or unix:PATH; may be repeated
    #[arg(long, value_name = "PLACE", default_value = DEFAULT_LISTEN)]
    pub listen: Vec<Listen>,
    /// Bearer token that clients send [default: one that is made, and kept in the data directory]
    #[arg(long, value_name = "TOKEN", env = "PVMM_SERVE_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    /// Certificate chain as PEM: TCP addresses speak TLS
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate as PEM
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Database, snapshots and audit log [default: service in pvmm's data directory]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub data_dir: Option<PathBuf>,
    /// Let sandboxes reach a name, address or network unless their request says otherwise; '*' for
    /// every public address
    #[arg(long, value_name = "RULE")]
    pub allow: Vec<String>,
    /// Most sandboxes of one token that run at a time
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_sandboxes: u32,
    /// Most guest memory of one token's running sandboxes
    #[arg(long, value_name = "SIZE", default_value = "1T", value_parser = args::memory_mib)]
    pub max_memory: u64,
    /// Most creates and forks of one token in a second
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub max_creates: u32,
    /// Memory of this host that stays free
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = args::memory_mib)]
    pub reserve_memory: u64,
    /// Disk space of the data directory that stays free
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = args::disk_mib)]
    pub reserve_disk: u64,
    /// Time without a request after which a persistent sandbox hibernates
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = args::duration)]
    pub idle: Duration,
    /// Print address and token as one JSON line, and end with the sandboxes when stdin closes
    #[arg(long)]
    pub with_parent: bool,
}
