//! Arguments of `pvmm top`.

use clap::Args;

use super::TEMPLATE;

/// Show all VMs and what they use of this host, every second
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm top
  pvmm top --once                      one frame, for a pipe or a log
  pvmm top --json

Keys: q quits; c, m, s, a, n and f sort by CPU, private memory, shared memory, age, name and forks.
Private is memory that only one VM has. Shared is what other VMs or files have too.
")]
pub struct Top {
    /// Print one frame as text
    #[arg(long)]
    pub once: bool,
    /// One frame as JSON, sizes in bytes
    #[arg(long)]
    pub json: bool,
}
