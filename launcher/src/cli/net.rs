//! Arguments of `pvmm net`.

use clap::Args;

use super::TEMPLATE;

/// Show or change what a VM's guest may reach
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm run -d --name web --allow-host pypi.org
  pvmm net web                         rules, what each carried, and what was denied
  pvmm net web --allow-host '*.example.com:443' --deny 192.0.2.0/24
  pvmm net web --allow 192.0.2.53:53/udp --allow-host ntp.example.com:123/udp
  pvmm net check web example.com:443   would the guest get there, and by which rule

A change holds at once, also for connections that are open. Nothing is allowed without a rule; a rule that
denies comes before every rule that allows. A rule that allows a port is for TCP unless it ends in /udp; without
a port, a network is for both and a name for TCP. Private ranges, this host and other VMs are denied even if an
allowed name leads there, unless a rule names that range.
")]
pub struct NetArgs {
    /// Id, the start of an id, or name; or the word 'check', a VM, and a target NAME:PORT
    #[arg(required = true, num_args = 1..=3, value_name = "VM")]
    pub words: Vec<String>,
    /// Let the guest reach a network, CIDR[:PORT[/tcp|/udp]], or 'all' for every public address
    #[arg(long, value_name = "RULE")]
    pub allow: Vec<String>,
    /// Let the guest reach a name, NAME[:PORT[/udp]] or '*.NAME[:PORT[/udp]]'
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Deny a network or a name, over TCP and UDP, and drop the rule that allowed it
    #[arg(long, value_name = "RULE")]
    pub deny: Vec<String>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}
