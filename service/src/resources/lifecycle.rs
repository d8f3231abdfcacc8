//! `/v1/sandboxes/{id}/lifecycle`: the time to live, and whether the sandbox is kept.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::audit::Act;
use crate::blocking::{Work, to_the_end};
use crate::clock;
use crate::error::ApiError;
use crate::extract::{Id, Json, Owner};
use crate::store::SandboxRow;

use super::sandboxes::check_ttl;

/// The body of a change.
#[derive(Debug, Default, Deserialize)]
pub struct Change {
    ttl_seconds: Option<i64>,
    persistent: Option<bool>,
}

fn shape(row: &SandboxRow) -> Value {
    let idle = clock::now_ms().saturating_sub(row.active_ms) / 1000;
    json!({
        "ttl_seconds": row.ttl_s.unwrap_or(0),
        "persistent": row.persistent,
        "idle_seconds": idle,
        "expires_at": row.expires_ms.map(clock::rfc3339),
    })
}

/// `GET /v1/sandboxes/{id}/lifecycle`
pub async fn get(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
) -> Result<axum::Json<Value>, ApiError> {
    Ok(axum::Json(shape(&app.find(&id)?.row())))
}

async fn changed(app: Arc<App>, id: String, change: Change) -> Result<Value, ApiError> {
    let ttl = change.ttl_seconds.map(|ttl| u64::try_from(ttl).unwrap_or(0));
    Ok(shape(&set(&app, &id, ttl, change.persistent).await?))
}

/// Sets the time to live from now on and whether the sandbox is kept, and returns its row.
pub async fn set(
    app: &Arc<App>,
    id: &str,
    ttl: Option<u64>,
    persistent: Option<bool>,
) -> Result<SandboxRow, ApiError> {
    let ttl = ttl.map(check_ttl).transpose()?;
    let entry = app.find(id)?;
    let _change = entry.change.lock().await;
    let (row, vm) = {
        let mut fields = entry.lock();
        let runs = fields.vm.is_some();
        let row = &mut fields.row;
        if let Some(ttl) = ttl {
            row.ttl_s = Some(ttl);
            row.expires_ms = runs.then(|| clock::now_ms() + ttl * 1000);
        }
        row.persistent = persistent.unwrap_or(row.persistent);
        (row.clone(), fields.vm.clone())
    };
    app.store.put_sandboxes(&[&row])?;
    if let Some(vm) = vm {
        // A persistent sandbox hibernates at that time, which only the server can do.
        let left = |at: u64| Duration::from_millis(at.saturating_sub(clock::now_ms()).max(1));
        let ttl = row.expires_ms.filter(|_| !row.persistent).map(left);
        app.blocking.run(Work::Short, move || Ok(vm.set_ttl(ttl)?)).await?;
    }
    Ok(row)
}

/// `PATCH /v1/sandboxes/{id}/lifecycle`
pub async fn patch(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<Change>,
) -> Result<axum::Json<Value>, ApiError> {
    let outcome = to_the_end(changed(Arc::clone(&app), id.clone(), body)).await;
    app.audit.write(&Act::new("lifecycle", &owner, &id).outcome(&outcome));
    outcome.map(axum::Json)
}
