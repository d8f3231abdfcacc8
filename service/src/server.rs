//! The server from its start to its end.
//!
//! Sandboxes outlive the server: the next one over the same data directory takes them up. Only a
//! server that a program started for itself ends its sandboxes with it.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use pvmm_sandbox::{Failure, Sandboxes, snapshots};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::announce::{Announcement, kept_token, private_dir};
use crate::app::App;
use crate::audit::Audit;
use crate::blocking;
use crate::data_dir::{self, INSTANCE};
use crate::error::ApiError;
use crate::ids::Instance;
use crate::life;
use crate::listen::{self, Bound, Connections};
use crate::options::{DEFAULT_LISTEN, ServeOptions};
use crate::passed;
use crate::routes;
use crate::store::Store;
use crate::tls;
use crate::traces::Traces;

/// Threads that run tasks; what waits has threads of its own.
const WORKERS: usize = 2;
/// How long the threads of requests may go on at the end.
const LAST_GRACE: Duration = Duration::from_secs(2);
/// How long the last spans may take to reach the collector.
const LAST_SPANS: Duration = Duration::from_secs(5);

/// How long conversations may take to end their sandboxes.
const LAST_ACTS: Duration = Duration::from_secs(90);

/// Serves requests until a signal, or until standard input closes if the server has a parent.
pub fn serve(options: ServeOptions) -> Result<(), Failure> {
    let passed = passed::take()?;
    let tls = options.tls.as_ref().map(tls::acceptor).transpose()?;
    life::egress_of(&options.default_egress)
        .map_err(|error| Failure::usage(format!("--allow: {}", error.message)))?;
    private_dir(&options.data_dir)?;
    let mut options = options;
    let (store, own_dir) = data_dir::claim(&mut options)?;
    snapshots::remember(&options.data_dir);
    let (token, kept_at) = match &options.token {
        Some(token) => (token.clone(), None),
        None => kept_token(&options.data_dir).map(|(token, path)| (token, Some(path)))?,
    };
    let mut app = open(options, store)?;
    data_dir::end_abandoned(&app);
    app.tokens.accept(&token, "given at the start");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(blocking::THREADS + 8)
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(async {
        let last_span = CancellationToken::new();
        let (traces, exporter) = app
            .options
            .traces
            .clone()
            .map(|(collector, name)| Traces::start(collector, name, last_span.clone()))
            .unzip();
        app.metrics.traces = traces;
        let app = Arc::new(app);
        let bound = bind_all(&app.options, passed, tls.is_some()).await?;
        life::reconcile(&app).map_err(fault)?;
        life::reconcile_builds(&app).map_err(fault)?;
        let url = bound.first().map(|bound| bound.url.clone()).unwrap_or_default();
        let connections = Connections::new(routes::router(Arc::clone(&app)), tls);
        let urls: Vec<_> = bound.iter().map(|bound| bound.url.clone()).collect();
        let sockets: Vec<_> = bound.into_iter().map(|bound| connections.serve(bound)).collect();
        life::prepare(&app);
        let sweep = tokio::spawn(life::sweep(Arc::clone(&app)));
        let announcement = Announcement { url, token };
        let _announced = announce(&app, &announcement)?;
        if app.options.print_address {
            let remark = |text: String| {
                if app.options.json_log.is_some() {
                    log::info!("{text}");
                } else {
                    eprintln!("{text}");
                }
            };
            for url in urls {
                remark(format!("listening on {url}"));
            }
            if let Some(path) = kept_at {
                remark(format!("the token is in {}", path.display()));
            }
        }
        wait_for_end(app.options.with_parent).await?;
        app.stopping.cancel();
        connections.stop();
        join_all(sockets).await;
        sweep.abort();
        app.builds.end().await;
        end_conversations(&app).await;
        if app.options.with_parent {
            end_all(&app).await;
        }
        last_span.cancel();
        if let Some(exporter) = exporter {
            let _ = tokio::time::timeout(LAST_SPANS, exporter).await;
        }
        Ok(())
    });
    runtime.shutdown_timeout(LAST_GRACE);
    drop(own_dir);
    outcome
}

fn fault(error: ApiError) -> Failure {
    Failure::fault(error.message)
}

/// Waits until conversations that end have ended their sandboxes, for as long as that should take.
pub async fn end_conversations(app: &App) {
    app.last_acts.close();
    if tokio::time::timeout(LAST_ACTS, app.last_acts.wait()).await.is_err() {
        log::error!("sandboxes of conversations go on until their time to live");
    }
}

/// Opens everything that the server has on disk.
pub fn open(options: ServeOptions, store: Store) -> Result<App, Failure> {
    let data = &options.data_dir;
    let new = Instance::new()?;
    let instance = store.fact(INSTANCE, || new.text().to_owned());
    let instance = instance.map_err(|error| Failure::fault(error.to_string()))?;
    let path = data.join("audit.log");
    let audit = Audit::open(&path)
        .map_err(|error| Failure::fault(format!("{}: {error}", path.display())))?;
    let sandboxes = Sandboxes::with_shells(options.shells)?;
    App::new(options, sandboxes, store, Instance::from_text(&instance), audit).map_err(fault)
}

/// Binds the places of the options and takes the sockets that were passed; without both, binds the
/// default address.
async fn bind_all(
    options: &ServeOptions,
    passed: Vec<OwnedFd>,
    with_tls: bool,
) -> Result<Vec<Bound>, Failure> {
    let mut bound = Vec::new();
    for socket in passed {
        bound.push(listen::take(socket, with_tls)?);
    }
    for place in &options.listen {
        bound.push(listen::bind(place, with_tls).await?);
    }
    if bound.is_empty() {
        let place = DEFAULT_LISTEN.parse().map_err(Failure::fault)?;
        bound.push(listen::bind(&place, with_tls).await?);
    }
    Ok(bound)
}

/// Tells the parent, or all programs of the user, where the server is.
fn announce(
    app: &App,
    announcement: &Announcement,
) -> Result<Option<crate::announce::Announced>, Failure> {
    if !app.options.with_parent {
        return announcement.publish(app.sandboxes.runtime_dir()).map(Some);
    }
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{}", announcement.line())?;
    stdout.flush()?;
    Ok(None)
}

/// Waits for a signal or, with a parent, for the end of standard input.
async fn wait_for_end(with_parent: bool) -> Result<(), Failure> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (closed, parent) = oneshot::channel::<()>();
    // Without a parent nothing is ever sent, and the sender lives as long as this function.
    let mut closed = Some(closed);
    if let Some(closed) = closed.take_if(|_| with_parent) {
        std::thread::Builder::new().name("pvmm-parent".into()).spawn(move || {
            let (mut stdin, mut buffer) = (std::io::stdin().lock(), [0; 64]);
            while stdin.read(&mut buffer).is_ok_and(|count| count > 0) {}
            let _ = closed.send(());
        })?;
    }
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = parent => {}
    }
    Ok(())
}

/// Ends all sandboxes, apart from persistent ones, which hibernate.
async fn end_all(app: &Arc<App>) {
    let ends = app.list().into_iter().map(|entry| async move {
        let row = entry.row();
        let outcome = if row.persistent {
            life::hibernate(app, &entry).await
        } else {
            life::end(app, &entry).await
        };
        if let Err(error) = outcome {
            log::error!("sandbox {}: {}", row.id, error.message);
        }
    });
    join_all(ends).await;
}
