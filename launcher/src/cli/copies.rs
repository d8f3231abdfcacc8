//! Arguments of `pvmm fork`, `snapshot`, `snapshots`, `restore`, and of commands on one VM.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};

use super::TEMPLATE;
use crate::args;
use crate::cli::start::EgressFlags;
use crate::cli::start::OverrideFlags;
use crate::cli::start::StartFlags;
use crate::cli::travel::{PullFlags, PushFlags};
use crate::secrets::SecretFlags;

/// Start copies of a running VM, or of a warm template
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm fork web                        one copy; its id is printed
  pvmm fork web -n 10                  ten copies, an id a line
  pvmm fork web -n 3 --name try        try-1, try-2, try-3
  pvmm fork base -n 10                 ten VMs from the warm template 'base'
  pvmm fork web --at before            a copy of the checkpoint 'before' of web
  pvmm fork web --net tap=t1,ip=10.0.1.2/24    its network card is on another tap

The copies start with everything the VM has in memory and on its disk, its processes included, and share
all that none of them changes. The VM itself stands still for a moment and goes on. A network card of a
copy is on a tap of its own, which is made unless --net names one; 'pvmm ps --json' says which. Secrets of
the VM are those of its copies.
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
    /// Begin with the state of this checkpoint of the VM, which itself stays where it is
    #[arg(long, value_name = "CHECKPOINT")]
    pub at: Option<String>,
    #[command(flatten)]
    pub copy: OverrideFlags,
    #[command(flatten)]
    pub egress: EgressFlags,
    #[command(flatten)]
    pub jail: StartFlags,
}

/// Write a running VM to disk: memory, devices, disks; or its disks alone
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm snapshot web before-upgrade
  pvmm snapshot web ./web.snapshot     a path of your own, because of the slash
  pvmm snapshot --incremental web now  only what changed since the snapshot it was restored from
  pvmm snapshot --disk-only web files  only its disks: small, and booted afresh
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
    /// Only the disks, without memory and processes: 'restore' boots a VM with them
    #[arg(long, conflicts_with = "incremental")]
    pub disk_only: bool,
    /// What a power cut may take: 'full' nothing, 'none' the snapshot
    #[arg(long, value_name = "HOW", default_value = "full")]
    pub sync: SyncMode,
    /// Take the place of a snapshot of that name
    #[arg(long)]
    pub replace: bool,
    /// Sign it with the bytes of this file, so that 'restore --key' takes no other
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// The result as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SyncMode {
    Full,
    None,
}

/// List, show, remove, send and fetch snapshots
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, args_conflicts_with_subcommands = true, before_help = "\
Examples:
  pvmm snapshots                       all there are; so does: pvmm snapshots ls
  pvmm snapshots inspect before-upgrade
  pvmm snapshots rm before-upgrade
  pvmm snapshots push before-upgrade /mnt/share      or a store such as s3://bucket/pvmm
  pvmm snapshots pull /mnt/share/before-upgrade      on another host; then: pvmm restore
  pvmm snapshots push web /mnt/share                 the hibernated VM 'web'
  pvmm snapshots pull /mnt/share/web                 on another host; then: pvmm wake web
")]
pub struct Snapshots {
    /// As JSON
    #[arg(long)]
    pub json: bool,
    #[command(subcommand)]
    pub verb: Option<SnapshotsVerb>,
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
    /// Send a snapshot, or a hibernated VM, to a folder or an S3-compatible store: only the parts
    /// that it lacks
    Push {
        /// Name or path of a snapshot, or name of a hibernated VM
        #[arg(value_name = "SNAPSHOT")]
        name: String,
        #[command(flatten)]
        flags: PushFlags,
        /// Let the snapshot name files in this folder, which are sent with it
        #[arg(long, value_name = "DIR")]
        allow_files: Vec<PathBuf>,
    },
    /// Fetch a snapshot, or a hibernated VM, from a store: only the parts that this host lacks
    Pull {
        #[command(flatten)]
        flags: PullFlags,
        /// Take the place of a snapshot of that name
        #[arg(long)]
        replace: bool,
        /// Let a hibernated VM reach what its network policy allowed; otherwise it reaches nothing
        #[arg(long)]
        keep_policy: bool,
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
  pvmm restore ./web.snapshot --key ~/.pvmm-key
  pvmm restore before-upgrade --net tap=auto,mac=random --drive vdc=other.img
  pvmm restore files --memory 2G       a snapshot of disks alone boots, in another size

A network card is on the tap of the name that it had, or with -n on one that is made for each VM; --net
names another. Several VMs get taps and sockets with a number each: tap=web is web-1, web-2. Secrets are in
no snapshot: --secret gives them again, with new placeholders for commands that are started from then on.
A snapshot of disks alone ('snapshot --disk-only') boots the kernel that its VM ran.
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
    /// For a snapshot of disks alone: memory other than its VM had: 512M, 2G, or a number of MiB
    #[arg(short, long, value_name = "SIZE", value_parser = args::memory_mib)]
    pub memory: Option<u64>,
    /// For a snapshot of disks alone: virtual CPUs other than its VM had, 1 to 32
    #[arg(long, value_name = "N", value_parser = args::cpus)]
    pub cpus: Option<u32>,
    /// For a snapshot of disks alone: a kernel other than its VM had
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub kernel: Option<PathBuf>,
    /// Compare every byte with its checksum first, even if that was done before
    #[arg(long)]
    pub verify: bool,
    #[command(flatten)]
    pub copy: OverrideFlags,
    #[command(flatten)]
    pub egress: EgressFlags,
    #[command(flatten)]
    pub secrets: SecretFlags,
    #[command(flatten)]
    pub jail: StartFlags,
    /// Only a snapshot that was written with the same key
    #[arg(long, value_name = "FILE")]
    pub key: Option<PathBuf>,
    /// Let the snapshot name files in this folder: images that it did not copy, or the snapshot
    /// that it goes on from. Without this, or a key, it may name only those in pvmm's own folders
    #[arg(long, value_name = "DIR")]
    pub allow_files: Vec<PathBuf>,
}

#[derive(Debug, Args)]
#[command(help_template = TEMPLATE)]
pub struct OneVm {
    /// Id, the start of an id, or name
    pub vm: String,
}
