//! Builds of templates, from the queue to the end, and after a restart of the server.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use pvmm_images::{Cache, Template};

use crate::app::App;
use crate::clock;
use crate::error::ApiError;
use crate::store::BuildRow;

/// The ended builds that are remembered.
const MAX_ENDED: usize = 100;

/// Returns the folder of a build: its sources until it ends, and its log.
pub fn build_folder(app: &App, id: &str) -> PathBuf {
    app.options.data_dir.join("builds").join(id)
}

/// Returns the folder of a build's files.
pub fn build_sources(app: &App, id: &str) -> PathBuf {
    build_folder(app, id).join("sources")
}

/// Returns the path of a build's log.
pub fn build_log(app: &App, id: &str) -> PathBuf {
    build_folder(app, id).join("log")
}

/// Starts a build that was admitted, in the background. `words` are the arguments of
/// `pvmm template build`.
pub fn start_build(app: &Arc<App>, row: BuildRow, words: Vec<String>) {
    let app = Arc::clone(app);
    tokio::spawn(async move {
        let begun = || keep(&app, &BuildRow { status: "running".to_owned(), ..row.clone() });
        let ended = app.builds.run(&row.id, &words, build_log(&app, &row.id), begun).await;
        let outcome = match ended {
            Ok(()) => Ok(image_bytes(row.name.clone()).await),
            Err(why) => Err(why),
        };
        finish(&app, row, outcome);
    });
}

/// Writes the end of a build, removes its sources and forgets old builds.
fn finish(app: &App, row: BuildRow, outcome: Result<u64, String>) {
    let (status, error, bytes) = match outcome {
        Ok(bytes) => ("done", None, bytes),
        Err(error) => ("failed", Some(error), 0),
    };
    let ended_ms = Some(clock::now_ms());
    keep(app, &BuildRow { status: status.to_owned(), error, bytes, ended_ms, ..row.clone() });
    app.builds.forget(&row.id);
    let _ = fs::remove_dir_all(build_sources(app, &row.id));
    let mut ended: Vec<_> = app.store.builds().unwrap_or_default();
    ended.retain(|row| row.ended_ms.is_some());
    ended.sort_by_key(|row| row.started_ms);
    let excess = ended.len().saturating_sub(MAX_ENDED);
    for row in ended.drain(..excess) {
        let _ = app.store.remove_build(&row.id);
        let _ = fs::remove_dir_all(build_folder(app, &row.id));
    }
}

fn keep(app: &App, row: &BuildRow) {
    if let Err(error) = app.store.put_build(row) {
        log::error!("build {}: {error}", row.id);
    }
}

/// Ends the builds that a server before this one has left.
pub fn reconcile_builds(app: &App) -> Result<(), ApiError> {
    for row in app.store.builds()? {
        if row.ended_ms.is_none() {
            finish(app, row, Err("the server ended during the build".to_owned()));
        }
    }
    Ok(())
}

/// Returns the size of a template's image, for display.
async fn image_bytes(name: String) -> u64 {
    let size = move || Some(Template::find(&Cache::open().ok()?, &name).ok()?.manifest.image_bytes);
    tokio::task::spawn_blocking(size).await.ok().flatten().unwrap_or_default()
}
