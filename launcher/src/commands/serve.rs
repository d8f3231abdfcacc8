//! `pvmm serve`: serves sandboxes over HTTP until a signal.
//!
//! The `service` crate does the work; this file only passes the flags on.

use pvmm_sandbox::snapshots;
use pvmm_service::{JsonLog, Limits, ServeOptions, TlsFiles};

use crate::cli::{LogFormat, Serve};
use crate::exit::{Failure, Outcome};

pub fn serve(args: Serve, quiet: bool) -> Outcome {
    let json_log = match args.log_format {
        LogFormat::Text => {
            pvmm_sandbox::logger::start();
            None
        }
        LogFormat::Json => Some(JsonLog::start()?),
    };
    if args.token.as_ref().is_some_and(|token| token.trim().is_empty()) {
        return Err(Failure::usage("--token: is empty"));
    }
    let (data_dir, shared) = match args.data_dir {
        Some(dir) => (std::path::absolute(dir)?, false),
        None => (snapshots::data_dir()?.join("service"), true),
    };
    let tls = args.tls_cert.zip(args.tls_key).map(|(cert, key)| TlsFiles { cert, key });
    pvmm_service::serve(ServeOptions {
        listen: args.listen,
        token: args.token,
        tls,
        data_dir,
        // A program that starts a server for itself does not mind another one.
        own_dir_if_taken: shared && args.with_parent,
        limits: Limits {
            sandboxes: args.max_sandboxes,
            memory_mib: args.max_memory,
            creates_per_second: args.max_creates,
            reserve_mib: args.reserve_memory,
            reserve_disk_mib: args.reserve_disk,
            idle: args.idle,
        },
        cpu: args.cpu,
        default_egress: args.allow,
        shells: args.prepared.into(),
        with_parent: args.with_parent,
        json_log,
        traces: args.otlp_endpoint.map(|collector| (collector, args.otlp_name)),
        print_address: !quiet,
    })?;
    Ok(0)
}
