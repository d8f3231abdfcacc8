//! `/v1/overview`: all that the page shows, in one answer that does not touch a guest.

use std::sync::Arc;

use axum::extract::State;
use pvmm_sandbox::checkpoint_tree::Checkpoint;
use serde_json::{Value, json};

use crate::app::App;
use crate::clock;
use crate::error::ApiError;
use crate::extract::Owner;
use crate::metrics::{Seen, Timing};
use crate::store::SnapshotRow;

/// The most checkpoints in one answer; sandboxes that come later have none in it.
const MAX_CHECKPOINTS: usize = 1000;

/// Writes a sandbox as the page reads it. Memory and processor time are null if it does not run, or
/// if they could not be read in time.
fn sandbox(seen: &Seen, snapshots: &[SnapshotRow], checkpoints: &[Checkpoint]) -> Value {
    let row = &seen.row;
    let taken = snapshots.iter().filter(|snapshot| snapshot.sandbox == row.id);
    let snapshots = taken.map(|it| json!({ "id": it.id, "created_ms": it.created_ms }));
    let checkpoints = checkpoints
        .iter()
        .map(|it| json!({ "name": it.name, "parent": it.parent, "current": it.current }));
    json!({
        "id": row.id,
        "template": row.template,
        "status": row.state.word(),
        "parent": row.parent,
        "created_ms": row.created_ms,
        "expires_ms": row.expires_ms,
        "cpu": row.cpus,
        "memory_mb": row.memory_mib,
        "memory_private": seen.usage.map(|usage| usage.private),
        "memory_shared": seen.usage.map(|usage| usage.shared),
        "cpu_ms": seen.usage.map(|usage| usage.cpu.as_millis() as u64),
        "has_checkpoint": row.has_checkpoint,
        "checkpoints": checkpoints.collect::<Vec<_>>(),
        "snapshots": snapshots.collect::<Vec<_>>(),
    })
}

fn operation(timing: &Timing) -> Value {
    json!({
        "time_ms": timing.time_ms,
        "operation": timing.operation.word(),
        "duration_ms": timing.took.as_secs_f64() * 1000.0,
        "succeeded": timing.succeeded,
    })
}

/// `GET /v1/overview`
pub async fn overview(
    State(app): State<Arc<App>>,
    _: Owner,
) -> Result<axum::Json<Value>, ApiError> {
    let sample = app.sample().await?;
    let snapshots = app.store.snapshots()?;
    let mut room = MAX_CHECKPOINTS;
    let sandboxes = sample.sandboxes.iter().map(|seen| {
        let entry = app.find(&seen.row.id).ok();
        let known = entry.map(|entry| entry.lock().checkpoints.clone()).unwrap_or_default();
        // All or none: a part of a tree would show a wrong one.
        let known = if known.len() <= room { known } else { Vec::new() };
        room -= known.len();
        sandbox(seen, &snapshots, &known)
    });
    let recent = app.metrics.recent.list();
    Ok(axum::Json(json!({
        "time_ms": clock::now_ms(),
        "version": env!("CARGO_PKG_VERSION"),
        "sandboxes": sandboxes.collect::<Vec<_>>(),
        "operations": recent.iter().map(operation).collect::<Vec<_>>(),
    })))
}
