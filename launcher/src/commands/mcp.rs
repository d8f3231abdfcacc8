//! `pvmm mcp`: gives an agent sandboxes as tools, over standard input and output.
//!
//! The `service` crate does the work; this file only passes the flags on.

use pvmm_sandbox::snapshots;
use pvmm_service::McpOptions;

use crate::cli::Mcp;
use crate::exit::Outcome;

pub fn mcp(args: Mcp) -> Outcome {
    pvmm_sandbox::logger::start();
    pvmm_service::serve_stdio(McpOptions {
        template: args.template,
        cpus: args.cpus,
        memory_mib: args.memory,
        ttl: args.ttl,
        egress: args.allow_host,
        data_dir: snapshots::data_dir()?.join("service"),
    })?;
    Ok(0)
}
