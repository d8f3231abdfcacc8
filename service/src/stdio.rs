//! `pvmm mcp`: one conversation over standard input and output.
//!
//! It is the service without sockets: the same sandboxes, limits and audit log, in a directory that
//! goes with the conversation. Sandboxes of a process that was killed are ended by the next one, or
//! by their time to live.

use std::sync::Arc;
use std::time::Duration;

use pvmm::CpuBaseline;
use pvmm_sandbox::{CreateOptions, Failure};
use rmcp::ServiceExt;
use rmcp::transport::async_rw::AsyncRwTransport;
use rmcp::transport::io::stdio;
use tokio::signal::unix::{SignalKind, signal};

use crate::announce::private_dir;
use crate::app::App;
use crate::blocking::{self, Work};
use crate::data_dir;
use crate::error::ApiError;
use crate::life::{self, MAX_TTL_S};
use crate::mcp::{Conversation, Defaults, Handler};
use crate::options::{Limits, McpOptions, ServeOptions};
use crate::server;

/// Threads that run tasks; what waits has threads of its own.
const WORKERS: usize = 1;
/// The most sandboxes of the conversation at a time.
const MAX_SANDBOXES: u32 = 64;
/// The longest message: a file of 8 MiB, each character of it escaped.
const MAX_LINE: usize = 64 << 20;
/// How long the threads of calls may go on at the end.
const LAST_GRACE: Duration = Duration::from_secs(2);

/// Serves one conversation until standard input closes or a signal comes, and ends its sandboxes.
pub fn serve_stdio(options: McpOptions) -> Result<(), Failure> {
    let usage = |flag: &str, error: ApiError| Failure::usage(format!("{flag}: {}", error.message));
    life::egress_of(&options.egress).map_err(|error| usage("--allow-host", error))?;
    if !(1..=MAX_TTL_S).contains(&options.ttl.as_secs()) {
        return Err(Failure::usage("--ttl: use 1 second to 30 days"));
    }
    let mut serve = serve_options(&options);
    if let Some(parent) = serve.data_dir.parent() {
        private_dir(parent)?;
    }
    let (store, own_dir) = data_dir::make_own(&mut serve)?;
    let app = Arc::new(server::open(serve, store)?);
    data_dir::end_abandoned(&app);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(blocking::THREADS + 8)
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(converse(&app, options));
    runtime.shutdown_timeout(LAST_GRACE);
    drop(own_dir);
    outcome
}

fn serve_options(options: &McpOptions) -> ServeOptions {
    ServeOptions {
        listen: Vec::new(),
        token: None,
        tls: None,
        data_dir: options.data_dir.clone(),
        own_dir_if_taken: true,
        limits: Limits { sandboxes: MAX_SANDBOXES, ..Limits::default() },
        cpu: CpuBaseline::Host,
        default_egress: options.egress.clone(),
        // A conversation has one sandbox, and forks now and then.
        shells: 0,
        with_parent: true,
        json_log: None,
        traces: None,
        print_address: false,
    }
}

async fn converse(app: &Arc<App>, options: McpOptions) -> Result<(), Failure> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let sweep = tokio::spawn(life::sweep(Arc::clone(app)));
    let warm = tokio::spawn(warm(Arc::clone(app), options.clone()));
    let McpOptions { template, cpus, memory_mib, ttl, .. } = options;
    let conversation =
        Conversation::new(Arc::clone(app), Defaults { template, cpus, memory_mib, ttl });
    let handler = Handler::of_user(conversation.clone());
    let spoken = async {
        // A peer that leaves before it has said hello is no failure.
        let (input, output) = stdio();
        let transport = AsyncRwTransport::new_server(input, output);
        match handler.serve(transport.with_max_line_length(MAX_LINE)).await {
            Ok(running) => drop(running.waiting().await),
            Err(error) => log::info!("no conversation: {error}"),
        }
    };
    tokio::select! {
        () = spoken => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = hang_up.recv() => {}
    }
    warm.abort();
    conversation.end().await;
    server::end_conversations(app).await;
    sweep.abort();
    Ok(())
}

/// Bakes the template of the conversation if it is not warm, so that the first call need not wait.
async fn warm(app: Arc<App>, options: McpOptions) {
    let mut create = CreateOptions::of(&options.template);
    create.cpus = options.cpus.unwrap_or(create.cpus);
    create.memory_mib = options.memory_mib.unwrap_or(create.memory_mib);
    create.egress = life::egress_of(&options.egress).ok().filter(|_| !options.egress.is_empty());
    let (sandboxes, shape) = (app.sandboxes.clone(), create.shape());
    let checked = shape.clone();
    let is_warm = app.blocking.run(Work::Short, move || Ok(sandboxes.is_warm(&checked))).await;
    if is_warm == Ok(false)
        && let Err(error) = app.bakes.bake(&shape).await
    {
        log::info!("{}", error.message);
    }
}
