//! Arguments of `pvmm checkpoint`, `log`, `checkout` and `diff`.

use std::path::PathBuf;

use clap::Args;

use super::TEMPLATE;

/// Remember this instant of a VM, for `checkout` and `rollback`
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm checkpoint web                  its name is printed: 1, 2, 3 ...
  pvmm checkpoint web --name before
  pvmm rollback web                    back to it, as often as you like
  pvmm checkpoint web --delete before

A VM may have 64 checkpoints, which are gone when it ends or hibernates. Each keeps the memory and the disk
blocks that the VM has changed since the one before. When there are too many, the oldest goes that
has a number for a name.
")]
pub struct Checkpoint {
    /// Id, the start of an id, or name
    pub vm: String,
    /// Name of the checkpoint; by default the next number
    #[arg(long, value_name = "NAME", conflicts_with = "delete")]
    pub name: Option<String>,
    /// Delete this checkpoint instead; those below it stay
    #[arg(long, value_name = "NAME")]
    pub delete: Option<String>,
}

/// Draw the tree of a VM's checkpoints
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm log web
  pvmm log web --json
")]
pub struct Log {
    /// Id, the start of an id, or name
    pub vm: String,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Take a VM to any of its checkpoints: memory, devices, disk
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm checkpoint web --name before
  pvmm exec web -- sh -c 'rm -rf /srv'
  pvmm checkpoint web --name after
  pvmm checkout web before             /srv is there, and the processes that ran then
  pvmm checkout web after              gone again

What happened since the last checkpoint is lost, unless you take another first. The next checkpoint is a
branch of this one.
")]
pub struct Checkout {
    /// Id, the start of an id, or name
    pub vm: String,
    /// The checkpoint
    pub name: String,
}

/// List the files that differ between two moments of a VM
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm diff web before                 since the checkpoint 'before'
  pvmm diff web before after           between two checkpoints
  pvmm diff web before --patch --path /etc
  pvmm diff web before --json

A file in each line: A added, M changed, D removed. The VM goes on and is not touched: the files are listed
in two short-lived copies, in which nothing else runs. Text files up to 256 KiB get a patch.
")]
pub struct Diff {
    /// Id, the start of an id, or name
    pub vm: String,
    /// The older checkpoint
    pub from: String,
    /// The newer checkpoint; by default the present
    pub to: Option<String>,
    /// Show the lines that differ
    #[arg(short, long)]
    pub patch: bool,
    /// Only the files in this folder of the guest
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    pub path: PathBuf,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Run the copies without a jail
    #[arg(long)]
    pub no_jail: bool,
}
