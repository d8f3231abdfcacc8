//! Arguments of `pvmm run`, `exec` and `attach`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueHint};
use pvmm::CpuBaseline;

use super::TEMPLATE;
use crate::args::{self, EnvVar, ImageFlag, ProcessName, VolumeFlag};
use crate::cli::start::EgressFlags;
use crate::cli::start::StartFlags;
use crate::secrets::SecretFlags;
use pvmm_sandbox::drive::{self, DriveFlag};
use pvmm_sandbox::net_card::{self, NetCard};
use pvmm_sandbox::ports::{self, PortSpec};
use pvmm_sandbox::sys::signals::{FORWARDED, WITH_TERMINAL};

/// Run a command in a fresh VM
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm run -- python3 -c 'print(6*7)'
  cat data.csv | pvmm run -i --memory 1G -- python3 -c 'import sys; print(len(sys.stdin.read()))'
  pvmm run -it                         a shell; so does: pvmm run -it -- bash
  pvmm run --timeout 30s -e TOKEN=x -w /tmp -- sh -c 'echo $TOKEN; pwd'
  pvmm run -d --name web -p 8080:8000 -- python3 -m http.server
  pvmm run --allow-host pypi.org --allow-host '*.pythonhosted.org' -- pip install requests
  pvmm run --secret API_KEY@api.example.com -- ./agent    sees a placeholder, the host the key
  pvmm run --image app.tar                                the command of a container image
  pvmm run --kernel vmlinux --rootfs rootfs.ext4 -- /bin/ls
")]
pub struct Run {
    /// Root filesystem to start from; built on first use
    #[arg(long, value_name = "NAME", default_value = "base", conflicts_with = "rootfs")]
    pub template: String,
    /// Container image to start from: HOST/NAME:TAG of a registry, a folder with an OCI layout, or
    /// an archive of one or of `docker save`; PATH:NAME for one of several. Its template is built
    /// on first use
    #[arg(long, value_name = "IMAGE", value_parser = args::image, conflicts_with_all = ["template", "rootfs"])]
    pub image: Option<ImageFlag>,
    /// Guest kernel, vmlinux or bzImage [default: pvmm's own if built, otherwise Debian's]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub kernel: Option<PathBuf>,
    /// Root filesystem image instead of a template; it is never written to
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub rootfs: Option<PathBuf>,
    /// Name for `exec`, `cp` and the other verbs
    #[arg(long, value_name = "NAME", value_parser = args::vm_name)]
    pub name: Option<String>,
    /// Memory: 512M, 2G, or a plain number of MiB
    #[arg(short, long, value_name = "SIZE", default_value = "512M", value_parser = args::memory_mib)]
    pub memory: u64,
    /// Virtual CPUs, 1 to 32
    #[arg(long, value_name = "N", default_value = "1", value_parser = args::cpus)]
    pub cpus: u32,
    /// Processor features that the guest is offered: host, x86-64-v2, x86-64-v3 or x86-64-v4, or a
    /// file with a CPU template of Firecracker's
    #[arg(long, value_name = "BASELINE", default_value = "host", value_parser = args::cpu)]
    pub cpu: CpuBaseline,
    /// How much the guest may write to its disk; grows as it is used
    #[arg(long, value_name = "SIZE", default_value = "8G", value_parser = args::disk_mib)]
    pub disk_size: u64,
    /// Another disk, /dev/vdc and on:
    /// PATH[,ro][,direct][,cache=writeback|unsafe][,engine=plain|io_uring|auto][,bps=SIZE][,iops=N]
    #[arg(long, value_name = "DRIVE", value_parser = drive::parse)]
    pub drive: Vec<DriveFlag>,
    /// Network card that reaches what --allow and --allow-host say, and nothing else [default: no
    /// card]; with a value, a card on a tap of this host, past that policy:
    /// tap=NAME|auto[,ip=ADDRESS/PREFIX[,gw=ADDRESS]][,dns=ADDRESS][,mac=MAC|random][,mtu=N][,bps=SIZE][,pps=N]
    #[arg(long, value_name = "CARD", value_parser = net_card::parse, num_args = 0..=1,
          default_missing_value = net_card::EGRESS)]
    pub net: Option<NetCard>,
    /// Mount a volume: NAME[:/FOLDER][:ro] [default folder: /workspace]
    #[arg(long, value_name = "VOLUME", value_parser = args::volume_mount)]
    pub volume: Vec<VolumeFlag>,
    #[command(flatten)]
    pub egress: EgressFlags,
    #[command(flatten)]
    pub secrets: SecretFlags,
    /// Let the guest give memory back: what it frees, and more when `pvmm balloon` asks
    #[arg(long)]
    pub balloon: bool,
    #[command(flatten)]
    pub command: CommandFlags,
    /// End the run this long after the VM was started: 30s, 500ms, 5m
    #[arg(long, value_name = "TIME", value_parser = args::duration)]
    pub timeout: Option<Duration>,
    /// Lead a port of this host into the guest: 8080:80, 0.0.0.0:8080:80, 0:80 for any free port
    #[arg(short, long = "publish", value_name = "HOST:GUEST", value_parser = ports::port_spec)]
    pub ports: Vec<PortSpec>,
    /// Also write the guest's console to this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub console: Option<PathBuf>,
    /// Boot the kernel even if there is a warm template to start from
    #[arg(long)]
    pub cold: bool,
    /// Start a VM that stays, and print its id
    #[arg(short, long, conflicts_with_all = ["interactive", "tty", "timeout"])]
    pub detach: bool,
    #[command(flatten)]
    pub jail: StartFlags,
    /// The command and its arguments
    #[arg(last = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub argv: Vec<OsString>,
}

/// How a command runs in a guest: the same for `run` and `exec`.
#[derive(Debug, Args)]
pub struct CommandFlags {
    /// Environment variable; KEY alone takes the value it has here
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = OsStringValueParser::new().try_map(|text| args::env_var(&text)))]
    pub env: Vec<EnvVar>,
    /// Directory to start in
    #[arg(short, long, value_name = "DIR", value_parser = OsStringValueParser::new().try_map(|text| args::workdir(&text)))]
    pub workdir: Option<PathBuf>,
    /// User to run as: name or number, with :GROUP if needed [default: root]
    #[arg(short, long, value_name = "USER", value_parser = args::user)]
    pub user: Option<String>,
    /// Pass standard input on (otherwise the command's is empty)
    #[arg(short, long)]
    pub interactive: bool,
    /// Give the command this terminal: every key, its size, its type; Ctrl-] three times leaves
    #[arg(short, long)]
    pub tty: bool,
}

impl CommandFlags {
    /// Returns the signals to hold and forward to the command.
    pub fn signals(&self) -> &'static [i32] {
        if self.tty { &WITH_TERMINAL } else { &FORWARDED }
    }
}

/// Run a command in a running VM
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm exec web -- uname -a
  pvmm exec -it web -- bash
  pvmm exec -i web -- sh < script.sh
  pvmm exec --timeout 10s -u nobody web -- ./job
  pvmm exec --memory 256M --pids 50 --cpus 0.5 web -- ./untrusted
  pvmm exec -d web -- ./server         prints an id; see: pvmm ps web, pvmm attach web:ID, pvmm kill web:ID
")]
pub struct Exec {
    #[command(flatten)]
    pub command: CommandFlags,
    /// Memory that the command and all it starts may use: 512M, 2G, or a plain number of MiB
    #[arg(short, long, value_name = "SIZE", value_parser = args::limit_mib)]
    pub memory: Option<u64>,
    /// Processes and threads that they may be
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub pids: Option<u64>,
    /// Processors that they may use: 1, 0.5, 2.25
    #[arg(long, value_name = "N", value_parser = args::cpu_milli)]
    pub cpus: Option<u32>,
    /// Start the command, print its id and leave it running
    #[arg(short, long)]
    pub detach: bool,
    /// End the command after this long: 30s, 500ms, 5m
    #[arg(long, value_name = "TIME", value_parser = args::duration)]
    pub timeout: Option<Duration>,
    /// Id, the start of an id, or name
    pub vm: String,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub argv: Vec<OsString>,
}

/// Show what a detached command printed and follow it to its end
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm attach web:7                    all that is kept of its output, then as it comes
  pvmm attach --from 4096 web:7        from this byte of its standard output on
  pvmm attach -i web:7                 also pass standard input on; a terminal is one again

Ends with the command and its exit code. Ctrl-C goes to the command; Ctrl-], three times, only leaves,
as do TERM and HUP.
")]
pub struct Attach {
    /// Skip what was printed before this byte of standard output
    #[arg(long, value_name = "OFFSET", default_value = "0")]
    pub from: u64,
    /// Pass standard input on, if the command was started with -i or -t
    #[arg(short, long)]
    pub interactive: bool,
    /// VM and id, as printed by `pvmm exec -d` and `pvmm ps VM`
    #[arg(value_name = "VM:ID", value_parser = args::process)]
    pub process: ProcessName,
}
