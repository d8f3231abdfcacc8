//! Arguments of `pvmm prune`.

use clap::Args;

use super::TEMPLATE;

/// Remove from the cache what nothing needs any more
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm prune --dry-run                 what would be removed?
  pvmm prune
  pvmm prune --all                     also what can be made or fetched again

Warm templates of an older pvmm, kernel or image go, and images without a template, old build steps and fetched
parts of container images. What a VM or a snapshot needs stays. A running service prunes once a day.
")]
pub struct Prune {
    /// Also warm templates, build steps, parts and templates of `run --image`: made when needed
    #[arg(short, long)]
    pub all: bool,
    /// Only list what would be removed
    #[arg(long)]
    pub dry_run: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}
