//! Arguments of `pvmm volume`, `hibernate`, `wake` and `ttl`.

use clap::{Args, Subcommand};

use super::TEMPLATE;
use crate::args::{self, Lifetime};

/// Disks that outlive the VMs that use them
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm volume create work --size 10G
  pvmm run --volume work:/workspace -- touch /workspace/kept
  pvmm volume ls
  pvmm volume cp work work-copy
  pvmm volume rm work-copy

One VM at a time may write a volume; several may read it with ':ro'. It takes on this host's disk what is
written to it.
")]
pub struct Volume {
    #[command(subcommand)]
    pub verb: VolumeVerb,
}

#[derive(Debug, Subcommand)]
pub enum VolumeVerb {
    /// Make an empty volume
    Create {
        #[arg(value_parser = args::vm_name)]
        name: String,
        /// How much fits into it
        #[arg(long, value_name = "SIZE", default_value = "10G", value_parser = args::volume_mib)]
        size: u64,
    },
    /// List the volumes
    #[command(visible_alias = "list")]
    Ls {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Let more fit into a volume that no VM uses
    Resize {
        name: String,
        #[arg(value_name = "SIZE", value_parser = args::volume_mib)]
        size: u64,
    },
    /// Copy a volume that no VM writes
    Cp {
        name: String,
        #[arg(value_name = "NEW-NAME", value_parser = args::vm_name)]
        new_name: String,
    },
    /// Remove volumes and all that is in them
    Rm {
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
    },
}

/// Write a VM to disk and end it; `wake` lets it go on
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm hibernate web                   it takes no memory any more
  pvmm ps                              it is listed as hibernated
  pvmm wake web                        its processes go on where they were
")]
pub struct Hibernate {
    /// Id, the start of an id, or name
    pub vm: String,
}

/// Let a hibernated VM go on
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm hibernate web
  pvmm wake web                        its id is printed; the name stays

The VM gets a new id, new random numbers and the right clock; names, files and processes are as they were.
")]
pub struct Wake {
    /// The VM's name, or the id that it had
    pub vm: String,
}

/// Change how long a running VM may live
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm run -d --name web --ttl 5m
  pvmm ttl web 2h                      two hours from now
  pvmm ttl web none                    for good
")]
pub struct Ttl {
    /// Id, the start of an id, or name
    pub vm: String,
    /// How long from now: 30s, 5m, 2h; or 'none'
    #[arg(value_name = "TIME", value_parser = args::ttl)]
    pub ttl: Lifetime,
}
