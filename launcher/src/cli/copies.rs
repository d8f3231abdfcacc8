//! Arguments of `pvmm fork`, `snapshot`, `snapshots`, `restore`, and of commands on one VM.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::TEMPLATE;
use crate::args;
use crate::cli::start::EgressFlags;
use crate::cli::start::OverrideFlags;
use crate::cli::start::StartFlags;
use crate::secrets::SecretFlags;

/// Start copies of a running VM, or of a warm template
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm fork web                        one copy; its id is printed
  pvmm fork web -n 10                  ten copies, an id a line
  pvmm fork web -n 3 --name try        try-1, try-2, try-3
  pvmm fork base -n 10                 ten VMs from the warm template 'base'
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
    #[command(flatten)]
    pub copy: OverrideFlags,
    #[command(flatten)]
    pub egress: EgressFlags,
    #[command(flatten)]
    pub jail: StartFlags,
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

/// List, show and remove snapshots
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, args_conflicts_with_subcommands = true, before_help = "\
Examples:
  pvmm snapshots                       all there are; so does: pvmm snapshots ls
  pvmm snapshots inspect before-upgrade
  pvmm snapshots rm before-upgrade
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

A network card is on the tap of the name that it had, or with -n on one that is made for each VM; --net
names another. Several VMs get taps and sockets with a number each: tap=web is web-1, web-2. Secrets are in
no snapshot: --secret gives them again, with new placeholders for commands that are started from then on.
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
