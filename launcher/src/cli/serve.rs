//! Arguments of `pvmm serve`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use pvmm::CpuBaseline;
use pvmm_service::{Collector, Listen};

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

Programs that were written for PandaStack or E2B use it after eval \"$(pvmm env)\". Sandboxes go on
when the server ends, and the next server takes them up.
")]
pub struct Serve {
    /// Where to listen, ADDR:PORT or unix:PATH; may be repeated [default: sockets passed by
    /// systemd, or 127.0.0.1:8088]
    #[arg(long, value_name = "PLACE")]
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
    /// Processor features of sandboxes: host, x86-64-v2, x86-64-v3 or x86-64-v4; snapshots of a
    /// level fit hosts of other models
    #[arg(long, value_name = "BASELINE", default_value = "host", value_parser = args::named_cpu)]
    pub cpu: CpuBaseline,
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
    /// Processes that wait for the next sandboxes, so that these start sooner
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(..=64))]
    pub prepared: u8,
    /// Form of the log on standard error; json has a line for each request
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// Collector of OpenTelemetry traces, as http://HOST:PORT; it gets OTLP over HTTP, as JSON
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<Collector>,
    /// Name of this server in traces
    #[arg(long, value_name = "NAME", env = "OTEL_SERVICE_NAME", default_value = "pvmm")]
    pub otlp_name: String,
    /// Print address and token as one JSON line, and end with the sandboxes when stdin closes
    #[arg(long)]
    pub with_parent: bool,
}

/// The form of the server's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// Print the variables with which clients find the service that runs here
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  eval \"$(pvmm env)\"                  for PandaStack's clients, E2B's and our own
  pvmm env --json
")]
pub struct Env {
    /// Print one object as JSON
    #[arg(long)]
    pub json: bool,
}
