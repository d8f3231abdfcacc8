//! What can be typed: every verb, flag and example, and how a wrong line is refused.
//!
//! Help, shell completions and man pages all come from these definitions, so they cannot disagree.

mod balloon;
mod watch;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand, ValueHint};

use crate::args::{self, EnvVar, Place, ProcessName};
use crate::drive::{self, DriveFlag};
use crate::exit::{Failure, Outcome, USAGE};
use crate::net_card::{self, NetCard};
use crate::ports::{self, PortSpec};
use crate::sys::signals::{FORWARDED, WITH_TERMINAL};

pub use balloon::Balloon;
pub use watch::Watch;

const TEMPLATE: &str =
    "{about-with-newline}\n{before-help}{usage-heading} {usage}\n\n{all-args}{after-help}";

const EXIT_CODES: &str = "\
Exit codes:
  0-255  the guest command's own code
  2      the command line or its input is wrong
  124    --timeout passed
  125    pvmm or its host failed
  126    the command cannot be executed
  127    the command was not found
  128+n  the command was ended by signal n

Environment:
  PVMM_RUNTIME_DIR   where running VMs are kept [default: $XDG_RUNTIME_DIR/pvmm, /run/pvmm, /tmp/pvmm-UID]
  XDG_CACHE_HOME     kernels and templates are kept in its pvmm folder [default: ~/.cache]
  XDG_DATA_HOME      snapshots are kept in its pvmm folder [default: ~/.local/share]
  PVMM_BOOT_TIMEOUT  how long a guest may take to answer [default: 60s]
  NO_COLOR           no colour on a terminal";

/// Disposable computers with their own kernel, for code you do not trust
#[derive(Debug, Parser)]
#[command(name = "pvmm", version, help_template = TEMPLATE, after_help = EXIT_CODES)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
#[command(before_help = "\
Examples:
  pvmm run -- python3 -c 'print(6*7)'     run one command in a fresh VM, which is gone afterwards
  pvmm run -d --name web                  start a VM that stays
  pvmm exec web -- uname -a               run a command in it
  pvmm cp ./app web:/srv                  copy a folder into it
  pvmm kill web                           end it
  pvmm doctor                             what can this host do?
")]
pub struct Cli {
    /// No progress, no remarks: only errors and the command's output
    #[arg(short, long, global = true)]
    pub quiet: bool,
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    Run(Box<Run>),
    Exec(Exec),
    Code(Code),
    Attach(Attach),
    Cp(Cp),
    Watch(Watch),
    Port(Port),
    Fork(Fork),
    Snapshot(Snapshot),
    Snapshots(Snapshots),
    Restore(Restore),
    /// Remember this instant of a VM, for `rollback`
    #[command(before_help = "\
Examples:
  pvmm checkpoint web
  pvmm rollback web                    back to it, as often as you like
")]
    Checkpoint(OneVm),
    /// Take a VM back to its checkpoint: memory, devices, disk
    #[command(before_help = "\
Examples:
  pvmm checkpoint web
  pvmm exec web -- rm -rf /srv
  pvmm rollback web                    it did not happen
")]
    Rollback(OneVm),
    /// Let a VM's processors stand still
    #[command(before_help = "\
Examples:
  pvmm pause web
  pvmm resume web
")]
    Pause(OneVm),
    /// Let a paused VM go on
    #[command(before_help = "\
Examples:
  pvmm pause web
  pvmm resume web
")]
    Resume(OneVm),
    Ps(Ps),
    Stats(Stats),
    Balloon(Balloon),
    Logs(Logs),
    Kill(Kill),
    Rm(Rm),
    Template(Template),
    Doctor(Doctor),
    Firecracker(Firecracker),
    Completions(Completions),
    Man(Man),
}

/// Run a command in a fresh VM
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm run -- python3 -c 'print(6*7)'
  cat data.csv | pvmm run -i --memory 1G -- python3 -c 'import sys; print(len(sys.stdin.read()))'
  pvmm run -it                         a shell; so does: pvmm run -it -- bash
  pvmm run --timeout 30s -e TOKEN=x -w /tmp -- sh -c 'echo $TOKEN; pwd'
  pvmm run -d --name web -p 8080:8000 -- python3 -m http.server
  pvmm run --kernel vmlinux --rootfs rootfs.ext4 -- /bin/ls
")]
pub struct Run {
    /// Root filesystem to start from; built on first use
    #[arg(long, value_name = "NAME", default_value = "base", conflicts_with = "rootfs")]
    pub template: String,
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
    /// How much the guest may write to its disk; grows as it is used
    #[arg(long, value_name = "SIZE", default_value = "8G", value_parser = args::disk_mib)]
    pub disk_size: u64,
    /// Another disk, /dev/vdc and on: PATH[,ro][,direct][,cache=writeback|unsafe][,engine=plain|io_uring|auto][,bps=SIZE][,iops=N]
    #[arg(long, value_name = "DRIVE", value_parser = drive::parse)]
    pub drive: Vec<DriveFlag>,
    /// Network card on a tap of this host [default: none]: tap=NAME[,ip=ADDRESS/PREFIX[,gw=ADDRESS]][,dns=ADDRESS][,mac=MAC][,mtu=N][,bps=SIZE][,pps=N]
    #[arg(long, value_name = "CARD", value_parser = net_card::parse)]
    pub net: Option<NetCard>,
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
    /// The signals that the command is told of, or its terminal.
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

/// Run code in an interpreter session whose variables stay
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm code web -c 'x = 6 * 7'
  pvmm code web -c x                         the value of the last expression is printed
  pvmm code web --json -c 'df.describe()'    every form of it: text, HTML, PNG, JSON
  pvmm code web --lang node -c 'await fetch(url)'
  pvmm code web --session mine < script.py
  pvmm code web --list
  pvmm code web --session mine --close

A session is started on first use and keeps its state until it is closed, ends, or its VM does.
Exits 1 if the code threw, 124 if --timeout interrupted it.
")]
pub struct Code {
    /// Id, the start of an id, or name
    pub vm: String,
    /// The code; standard input without it
    #[arg(short, long, value_name = "CODE")]
    pub code: Option<String>,
    /// Name of the session [default: the language's name]
    #[arg(short, long, value_name = "NAME")]
    pub session: Option<String>,
    /// Language of the session
    #[arg(short, long, value_name = "LANG", default_value = "python")]
    pub lang: CodeLanguage,
    /// Interrupt the code after this long; the session goes on: 30s, 500ms, 5m
    #[arg(long, value_name = "TIME", value_parser = args::duration)]
    pub timeout: Option<Duration>,
    /// Everything as one JSON document, each output by MIME type
    #[arg(long)]
    pub json: bool,
    /// List the sessions
    #[arg(long, conflicts_with_all = ["code", "close", "session", "timeout"])]
    pub list: bool,
    /// End the session
    #[arg(long, conflicts_with_all = ["code", "timeout"])]
    pub close: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CodeLanguage {
    Python,
    Node,
}

impl CodeLanguage {
    pub fn language(self) -> pvmm::agent::Language {
        match self {
            Self::Python => pvmm::agent::Language::Python,
            Self::Node => pvmm::agent::Language::Node,
        }
    }

    pub fn of(language: pvmm::agent::Language) -> Self {
        match language {
            pvmm::agent::Language::Python => Self::Python,
            pvmm::agent::Language::Node => Self::Node,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node => "node",
        }
    }

    /// What is looked for in the guest.
    pub fn program(self) -> &'static str {
        match self {
            Self::Python => "python3",
            Self::Node => "node",
        }
    }
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

/// Copy files and folders into or out of a VM
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm cp notes.txt web:/root/
  pvmm cp ./app web:/srv               the folder becomes /srv/app
  pvmm cp web:/var/log ./logs

A target that is an existing folder receives the source inside it; otherwise the target is the copy.
")]
pub struct Cp {
    // Folders are always copied whole; the flag is taken because fingers type it.
    #[arg(short, long, hide = true)]
    pub recursive: bool,
    /// Keep owners, by their numbers; out of a VM that takes root
    #[arg(short, long)]
    pub archive: bool,
    /// Path here, or VM:PATH
    #[arg(value_name = "SOURCE", value_hint = ValueHint::AnyPath, value_parser = OsStringValueParser::new().try_map(|text| args::place(&text)))]
    pub source: Place,
    /// Path here, or VM:PATH
    #[arg(value_name = "TARGET", value_hint = ValueHint::AnyPath, value_parser = OsStringValueParser::new().try_map(|text| args::place(&text)))]
    pub target: Place,
}

/// Lead ports of this host into a running VM, until Ctrl-C
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm port web 8080:80                port 8080 here is port 80 in the VM
  pvmm port web 8080:80 5432:5432
  pvmm port web 0:80                   any free port here; the first line printed says which
  pvmm port web 0.0.0.0:8080:80        also for other hosts; without an address only for this one

The guest needs no network: its agent connects to the port on the guest's own loopback.
")]
pub struct Port {
    /// Id, the start of an id, or name
    pub vm: String,
    /// [ADDRESS:]HOST:GUEST, or one number for both
    #[arg(required = true, value_name = "HOST:GUEST", value_parser = ports::port_spec)]
    pub ports: Vec<PortSpec>,
}

/// Start copies of a running VM, or of a warm template
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm fork web                        one copy; its id is printed
  pvmm fork web -n 10                  ten copies, an id a line
  pvmm fork web -n 3 --name try        try-1, try-2, try-3
  pvmm fork base -n 10                 ten VMs from the warm template 'base'

The copies start with everything the VM has in memory and on its disk, its processes included, and share
all that none of them changes. The VM itself stands still for a moment and goes on.
")]
pub struct Fork {
    /// Id, the start of an id, or name of a VM; or the name of a template
    pub source: String,
    /// How many
    #[arg(short = 'n', long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: u32,
    /// Name for the copy; several get a number each
    #[arg(long, value_name = "NAME", value_parser = args::vm_name)]
    pub name: Option<String>,
}

/// Write a running VM to disk: memory, devices, disks
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm snapshot web before-upgrade
  pvmm snapshot web ./web.snapshot     a path of your own, because of the slash
  pvmm snapshot --incremental web now  only what changed since the snapshot it was restored from
  pvmm restore before-upgrade
")]
pub struct Snapshot {
    /// Id, the start of an id, or name
    pub vm: String,
    /// What to call it, or a path
    pub name: String,
    /// Only what changed since the snapshot that the VM was restored from
    #[arg(long)]
    pub incremental: bool,
    /// What a power cut may take: 'full' nothing, 'none' the snapshot
    #[arg(long, value_name = "HOW", default_value = "full")]
    pub sync: SyncMode,
    /// Take the place of a snapshot of that name
    #[arg(long)]
    pub replace: bool,
    /// The result as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SyncMode {
    Full,
    None,
}

/// List, show and remove snapshots
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, arg_required_else_help = true, before_help = "\
Examples:
  pvmm snapshots ls
  pvmm snapshots inspect before-upgrade
  pvmm snapshots rm before-upgrade
")]
pub struct Snapshots {
    #[command(subcommand)]
    pub verb: SnapshotsVerb,
}

#[derive(Debug, Subcommand)]
pub enum SnapshotsVerb {
    /// List the snapshots in pvmm's data directory
    #[command(visible_alias = "list")]
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove snapshots
    Rm {
        #[arg(required = true, value_name = "SNAPSHOT")]
        names: Vec<String>,
    },
    /// Show what a snapshot says of itself, as JSON
    Inspect {
        #[arg(value_name = "SNAPSHOT")]
        name: String,
    },
}

/// Start a VM from a snapshot
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm restore before-upgrade --name web
  pvmm restore ./web.snapshot -n 5
")]
pub struct Restore {
    /// Its name, or a path
    pub snapshot: String,
    /// How many VMs
    #[arg(short = 'n', long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub count: u32,
    /// Name for the VM; several get a number each
    #[arg(long, value_name = "NAME", value_parser = args::vm_name)]
    pub name: Option<String>,
    /// Compare every byte with its checksum first, even if that was done before
    #[arg(long)]
    pub verify: bool,
}

#[derive(Debug, Args)]
#[command(help_template = TEMPLATE)]
pub struct OneVm {
    /// Id, the start of an id, or name
    pub vm: String,
}

/// List VMs, or the detached commands of one
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm ps
  pvmm ps web                         what `pvmm exec -d` started there
  pvmm ps -q | xargs pvmm kill
  pvmm ps --json
")]
pub struct Ps {
    /// Id, the start of an id, or name of a VM whose detached commands to list
    pub vm: Option<String>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Show what a VM's guest uses
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm stats web
  pvmm stats --json web
")]
pub struct Stats {
    /// Id, the start of an id, or name
    pub vm: String,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Show what a VM's command printed, or the guest's console
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm logs web
  pvmm logs -f web
  pvmm logs --console web
")]
pub struct Logs {
    /// Id, the start of an id, or name
    pub vm: String,
    /// Keep printing until the VM ends
    #[arg(short, long)]
    pub follow: bool,
    /// The guest's console; the default for a VM that was started without a command
    #[arg(long)]
    pub console: bool,
}

/// End VMs and remove them, or end detached commands
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm kill web
  pvmm kill --signal KILL web         at once, without telling the guest
  pvmm kill web:7                     a command that `pvmm exec -d` started, with all it started
")]
pub struct Kill {
    /// Ids, starts of ids, or names; VM:ID is a detached command
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
    /// TERM lets the guest shut down first, KILL does not
    #[arg(short, long, value_name = "SIGNAL", default_value = "TERM", ignore_case = true)]
    pub signal: KillSignal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KillSignal {
    #[value(name = "TERM", alias = "SIGTERM", alias = "15")]
    Term,
    #[value(name = "KILL", alias = "SIGKILL", alias = "9")]
    Kill,
}

/// Remove VMs that have ended
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm rm web
  pvmm rm -f web                      also if it is still running
")]
pub struct Rm {
    /// Ids, starts of ids, or names
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<String>,
    /// End those that still run
    #[arg(short, long)]
    pub force: bool,
}

/// Build, list and remove templates
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, arg_required_else_help = true, before_help = "\
Examples:
  pvmm template build                        build 'base' now instead of on first use
  pvmm template build data -p git,jq         base with more Debian packages
  pvmm template ls
  pvmm template inspect base
")]
pub struct Template {
    #[command(subcommand)]
    pub verb: TemplateVerb,
}

#[derive(Debug, Subcommand)]
pub enum TemplateVerb {
    /// Build a template now instead of on first use
    Build {
        /// What to call it; 'base' is built in, another name is base with more packages
        #[arg(default_value = "base", conflicts_with = "recipe")]
        name: String,
        /// Debian packages to add to those of base
        #[arg(short, long, value_name = "PACKAGE", value_delimiter = ',', num_args = 1..)]
        packages: Vec<String>,
        /// Recipe file: {"name": "data", "packages": ["git", "jq"]}
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "packages")]
        recipe: Option<PathBuf>,
        /// Build it again even if it is there
        #[arg(long)]
        force: bool,
        /// The result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Boot a template once and keep it warm, so that a run need not boot; done by `build` where there is KVM
    Bake {
        #[arg(default_value = "base")]
        name: String,
        /// Memory of the runs that start from it
        #[arg(short, long, value_name = "SIZE", default_value = "512M", value_parser = args::memory_mib)]
        memory: u64,
        /// Virtual CPUs of the runs that start from it
        #[arg(long, value_name = "N", default_value = "1", value_parser = args::cpus)]
        cpus: u32,
        /// Disk size of the runs that start from it
        #[arg(long, value_name = "SIZE", default_value = "8G", value_parser = args::disk_mib)]
        disk_size: u64,
    },
    /// List the templates that are built or can be
    #[command(visible_alias = "list")]
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove built templates
    Rm {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
    /// Show what a template is made of
    Inspect {
        name: String,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

/// Show what this host has and lacks
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm doctor
  pvmm doctor --json

Exits 0 if a VM can run here and 1 if not.
")]
pub struct Doctor {
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Stand in for Firecracker: its flags, its API socket
#[derive(Debug, Args)]
#[command(disable_help_flag = true, help_template = TEMPLATE, before_help = "\
Examples:
  pvmm firecracker --api-sock /run/fc.sock
  pvmm firecracker --help
  ln -s $(command -v pvmm) /usr/local/bin/firecracker     the same, by that name
")]
pub struct Firecracker {
    /// Firecracker's own flags
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<OsString>,
}

/// Print a shell's completion script
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm completions bash > /etc/bash_completion.d/pvmm
  pvmm completions zsh > \"${fpath[1]}/_pvmm\"
  pvmm completions fish > ~/.config/fish/completions/pvmm.fish
")]
pub struct Completions {
    pub shell: clap_complete::Shell,
}

/// Print the manual page, or write all of them to a folder
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm man | man -l -
  pvmm man --dir /usr/local/share/man/man1
")]
pub struct Man {
    /// Folder for one page per verb
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}

/// Turns clap's refusal into pvmm's one line; help and version go to standard output as asked.
pub fn refuse(error: clap::Error) -> Outcome {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            error.print()?;
            Ok(0)
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            error.print()?;
            Ok(USAGE)
        }
        kind => Err(one_line(kind, &error.render().to_string())),
    }
}

/// Keeps the first paragraph of clap's text, and its tip or the way to the help.
fn one_line(kind: ErrorKind, text: &str) -> Failure {
    let paragraph: Vec<&str> =
        text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let message = paragraph.join(" ");
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    let tip = text.lines().find_map(|line| line.trim().strip_prefix("tip: "));
    // A bad value comes without usage, and its message already says what to write.
    let usage = text.lines().find_map(|line| line.strip_prefix("Usage: "));
    let hint = tip.map(str::to_owned).or_else(|| usage.map(|usage| way_on(kind, usage)));
    Failure { hint, ..Failure::usage(message) }
}

/// What to try next, from the usage line of the verb that was refused.
fn way_on(kind: ErrorKind, usage: &str) -> String {
    let is_verb = |word: &&str| word.starts_with(|c: char| c.is_ascii_lowercase());
    let verb = usage.split(' ').take_while(is_verb).collect::<Vec<_>>().join(" ");
    match kind == ErrorKind::UnknownArgument && usage.contains("-- <CMD>") {
        true => format!("the command goes after '--', as in: {verb} … -- CMD ARG…"),
        false => format!("see '{verb} --help'"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn refusal(line: &str) -> Failure {
        refuse(Cli::try_parse_from(line.split(' ')).unwrap_err()).unwrap_err()
    }

    #[test]
    fn definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn refusal_of_bad_value_names_flag_and_fix() {
        let failure = refusal("pvmm run --cpus 33 -- true");
        assert_eq!(failure.code, USAGE);
        assert_eq!(
            failure.message,
            "invalid value '33' for '--cpus <N>': use a number from 1 to 32"
        );
        assert_eq!(refusal("pvmm ps x y").hint.as_deref(), Some("see 'pvmm ps --help'"));
    }

    #[test]
    fn refusal_of_command_without_dashes_says_where_it_goes() {
        let failure = refusal("pvmm run python3");
        assert!(failure.message.contains("'python3'"), "{failure:?}");
        assert!(failure.hint.unwrap().contains("after '--'"));
    }

    #[test]
    fn refusal_of_missing_arguments_is_one_line() {
        let failure = refusal("pvmm exec");
        assert!(failure.message.contains("<VM>"), "{failure:?}");
        assert!(!failure.message.contains('\n'));
    }

    #[test]
    fn help_of_every_verb_starts_with_examples() {
        for verb in Cli::command().get_subcommands_mut() {
            let help = verb.render_long_help().to_string();
            let examples = help.find("Examples:").expect("examples");
            assert!(examples < help.find("Usage:").unwrap(), "{help}");
        }
    }
}
