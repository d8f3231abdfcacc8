//! Arguments of `pvmm mcp`.

use std::time::Duration;

use clap::Args;

use super::TEMPLATE;
use crate::args;

/// Give an agent sandboxes as tools, over the Model Context Protocol on stdin and stdout
#[derive(Debug, Args)]
#[command(help_template = TEMPLATE, before_help = "\
Examples:
  pvmm mcp                                          as the command of an MCP server
  pvmm mcp --template code-interpreter --memory 2G
  pvmm mcp --allow-host pypi.org --allow-host '*.pythonhosted.org'
  claude mcp add sandbox -- pvmm mcp                for Claude Code

In other hosts: {\"mcpServers\": {\"sandbox\": {\"command\": \"pvmm\", \"args\": [\"mcp\"]}}}

The sandboxes of the conversation end with this program. `pvmm serve` speaks the same protocol over
HTTP at /mcp.
")]
pub struct Mcp {
    /// Template of the sandboxes; built on first use
    #[arg(long, value_name = "NAME", default_value = "base")]
    pub template: String,
    /// Memory: 512M, 2G, or a plain number of MiB [default: 512M]
    #[arg(short, long, value_name = "SIZE", value_parser = args::memory_mib)]
    pub memory: Option<u64>,
    /// Virtual CPUs, 1 to 32 [default: 1]
    #[arg(long, value_name = "N", value_parser = args::cpus)]
    pub cpus: Option<u32>,
    /// End a sandbox after this long without a call: 30m, 2h
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = args::duration)]
    pub ttl: Duration,
    /// Let sandboxes reach a name, NAME[:PORT] or '*.NAME[:PORT]'; '*' for every public address
    /// [default: no network]
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
}
