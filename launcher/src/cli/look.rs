//! Arguments of `pvmm ps`, `stats`, `events`, `logs`, `kill` and `rm`.

use clap::Args;

use super::TEMPLATE;

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
    /// Taken out of habit: those that have ended are listed anyway
    #[arg(short, long, hide = true)]
    pub all: bool,
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

/// Tell what happens to VMs, until it is interrupted
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm events
  pvmm events web                     of one VM
  pvmm events --json | jq 'select(.event == \"exited\")'
")]
pub struct Events {
    /// Id, the start of an id, or name
    pub vm: Option<String>,
    /// One JSON object in each line
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
