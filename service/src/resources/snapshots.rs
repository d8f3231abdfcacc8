//! `/v1/sandboxes/{id}/snapshots` and `/v1/snapshots`.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::audit::Act;
use crate::blocking::Work;
use crate::clock;
use crate::error::ApiError;
use crate::extract::{Id, Json, Owner, Queried};
use crate::ids;
use crate::life::enter;
use crate::sse;
use crate::store::SnapshotRow;

/// The query of a listing.
#[derive(Debug, Default, Deserialize)]
pub struct Wanted {
    sandbox_id: Option<String>,
}

/// The body of a new snapshot.
#[derive(Debug, Default, Deserialize)]
pub struct Create {
    #[serde(default)]
    disk_only: bool,
}

fn shape(row: &SnapshotRow) -> Value {
    json!({
        "id": row.id,
        "snapshot_id": row.id,
        "sandbox_id": row.sandbox,
        "template": row.template,
        "disk_only": row.disk_only,
        "size_bytes": row.bytes,
        "created_at": clock::rfc3339(row.created_ms),
    })
}

/// Returns the space that the files of a folder take on disk.
fn disk_bytes(folder: &Path) -> std::io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let mut total = 0;
    for entry in fs::read_dir(folder)? {
        total += entry?.metadata()?.blocks() * 512;
    }
    Ok(total)
}

/// Takes a snapshot of a sandbox, or of its disks alone; the sandbox goes on.
pub async fn take(
    app: &Arc<App>,
    id: &str,
    owner: &str,
    disk_only: bool,
) -> Result<SnapshotRow, ApiError> {
    app.admission.require_disk()?;
    let in_use = enter(app, id).await?;
    in_use.require_awake()?;
    let (sandbox, snapshot) = (in_use.row(), ids::new_id()?);
    let folder = app.snapshot_dir(&snapshot);
    let work = move || {
        if let Some(parent) = folder.parent() {
            fs::create_dir_all(parent)?;
        }
        let written = if disk_only {
            in_use.vm().snapshot_disks(&folder)
        } else {
            in_use.vm().snapshot(&folder)
        };
        if written.is_err() {
            // What is there is of no use, and a restart would remove it, too.
            let _ = fs::remove_dir_all(&folder);
        }
        written?;
        Ok(disk_bytes(&folder)?)
    };
    let bytes = app.blocking.run(Work::Long, work).await?;
    let row = SnapshotRow {
        id: snapshot,
        sandbox: sandbox.id,
        template: sandbox.template,
        cpus: sandbox.cpus,
        memory_mib: sandbox.memory_mib,
        disk_only,
        egress: sandbox.egress,
        bytes,
        created_ms: clock::now_ms(),
        owner: owner.to_owned(),
    };
    app.store.put_snapshot(&row)?;
    Ok(row)
}

/// `POST /v1/sandboxes/{id}/snapshots`
pub async fn create(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<Create>,
) -> Result<Response, ApiError> {
    app.find(&id)?;
    let work = async move {
        let begun = Instant::now();
        let outcome = take(&app, &id, &owner, body.disk_only).await;
        app.audit.write(&Act::new("snapshot", &owner, &id).since(begun).outcome(&outcome));
        outcome.map(|row| shape(&row))
    };
    Ok(sse::slow_json(StatusCode::CREATED, work, ApiError::json).await)
}

/// `GET /v1/snapshots`
pub async fn list(
    State(app): State<Arc<App>>,
    _: Owner,
    Queried(wanted): Queried<Wanted>,
) -> Result<axum::Json<Value>, ApiError> {
    let mut rows = app.store.snapshots()?;
    if let Some(sandbox) = &wanted.sandbox_id {
        rows.retain(|row| &row.sandbox == sandbox);
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.created_ms));
    Ok(axum::Json(json!({ "snapshots": rows.iter().map(shape).collect::<Vec<_>>() })))
}

fn find(app: &App, id: &str) -> Result<SnapshotRow, ApiError> {
    let row = app.store.snapshot(id)?;
    row.ok_or_else(|| ApiError::not_found(format!("snapshot '{id}' not found")))
}

/// `GET /v1/snapshots/{id}`
pub async fn get(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
) -> Result<axum::Json<Value>, ApiError> {
    Ok(axum::Json(shape(&find(&app, &id)?)))
}

/// `DELETE /v1/snapshots/{id}`
pub async fn delete(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
) -> Result<StatusCode, ApiError> {
    find(&app, &id)?;
    let folder = app.snapshot_dir(&id);
    // The row goes first: without it, a restart removes what is left of the folder.
    app.store.remove_snapshot(&id)?;
    let work = move || Ok(fs::remove_dir_all(&folder)?);
    let outcome = app.blocking.run(Work::Long, work).await;
    app.audit.write(&Act::new("delete_snapshot", &owner, "").what(&id).outcome(&outcome));
    outcome.map(|()| StatusCode::NO_CONTENT)
}
