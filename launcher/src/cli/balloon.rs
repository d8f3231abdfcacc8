//! Arguments of `pvmm balloon`.

use clap::Args;

use super::TEMPLATE;
use crate::args;

/// Ask a VM's guest to give memory back, or show how much it has given
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm run -d --name web --memory 2G --balloon
  pvmm balloon web 1G                  the guest gives up 1 GiB, as far as it can spare it
  pvmm balloon web                     how far it is
  pvmm balloon web 0                   it may have all of it back
")]
pub struct Balloon {
    /// Id, the start of an id, or name
    pub vm: String,
    /// How much the guest is to give up: 512M, 2G, or a plain number of MiB
    #[arg(value_name = "SIZE", value_parser = args::balloon_mib)]
    pub size: Option<u64>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}
