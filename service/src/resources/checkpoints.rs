//! `/v1/sandboxes/{id}/checkpoint`, `/checkpoints`, `/checkout`, `/rollback` and `/diff`.
//!
//! The monitor process of a sandbox keeps its checkpoints, so they outlive the service. A checkout
//! cuts off requests that run in the sandbox: their connections are of the state that is left.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use pvmm_sandbox::checkpoint_tree::Checkpoint;
use pvmm_sandbox::file_diff::{DiffOptions, FileDiff};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::audit::Act;
use crate::blocking::{Work, to_the_end};
use crate::clock;
use crate::error::ApiError;
use crate::extract::{Id, Json, Name, Owner, Queried};
use crate::life::enter;
use crate::limits::Use;
use crate::metrics::Operation;
use crate::sse;
use crate::store::State as SandboxState;

/// The body of a checkpoint.
#[derive(Debug, Default, Deserialize)]
pub struct Take {
    name: Option<String>,
}

/// The body of a checkout.
#[derive(Debug, Deserialize)]
pub struct GoTo {
    name: String,
}

/// The query of a diff.
#[derive(Debug, Deserialize)]
pub struct Moments {
    from: String,
    to: Option<String>,
    path: Option<String>,
    #[serde(default)]
    patch: bool,
}

/// Returns a checkpoint as clients see it.
fn shape(checkpoint: &Checkpoint) -> Value {
    json!({
        "name": checkpoint.name,
        "parent": checkpoint.parent,
        "created_at": clock::rfc3339(checkpoint.created_ms),
        "current": checkpoint.current,
    })
}

async fn checkpointed(
    app: Arc<App>,
    id: String,
    name: Option<String>,
) -> Result<Checkpoint, ApiError> {
    let in_use = enter(&app, &id).await?;
    in_use.require_awake()?;
    let entry = Arc::clone(in_use.entry());
    let _change = entry.change.lock().await;
    let vm = in_use.vm().clone();
    let work = move || {
        let taken = vm.checkpoint(name.as_deref())?;
        // The oldest may have gone for it.
        Ok((taken, vm.checkpoints()?))
    };
    let (taken, all) = app.blocking.run(Work::Long, work).await?;
    let mut fields = entry.lock();
    fields.row.has_checkpoint = true;
    fields.checkpoints = all;
    app.store.put_sandboxes(&[&fields.row])?;
    Ok(taken)
}

async fn checked_out(app: Arc<App>, id: String, name: Option<String>) -> Result<(), ApiError> {
    let in_use = enter(&app, &id).await?;
    in_use.require_awake()?;
    let entry = Arc::clone(in_use.entry());
    let _change = entry.change.lock().await;
    let vm = in_use.vm().clone();
    let work = move || {
        vm.checkout(name.as_deref())?;
        Ok(vm.checkpoints()?)
    };
    entry.lock().checkpoints = app.blocking.run(Work::Long, work).await?;
    Ok(())
}

async fn deleted(app: Arc<App>, id: String, name: String) -> Result<(), ApiError> {
    let in_use = enter(&app, &id).await?;
    let entry = Arc::clone(in_use.entry());
    let _change = entry.change.lock().await;
    let vm = in_use.vm().clone();
    let work = move || {
        vm.delete_checkpoint(&name)?;
        Ok(vm.checkpoints()?)
    };
    let left = app.blocking.run(Work::Short, work).await?;
    let mut fields = entry.lock();
    fields.row.has_checkpoint = !left.is_empty();
    fields.checkpoints = left;
    app.store.put_sandboxes(&[&fields.row])?;
    Ok(())
}

/// Keeps the present state of a sandbox as a checkpoint, of this name or numbered.
pub async fn take_checkpoint(
    app: &Arc<App>,
    owner: &str,
    id: &str,
    name: Option<String>,
) -> Result<Checkpoint, ApiError> {
    let begun = Instant::now();
    let work = to_the_end(checkpointed(Arc::clone(app), id.to_owned(), name));
    let outcome = app.metrics.timed(Operation::Checkpoint, work).await;
    let what = outcome.as_ref().map_or("", |taken| &taken.name[..]);
    let act = Act::new("checkpoint", owner, id).what(what).since(begun);
    app.audit.write(&act.outcome(&outcome));
    outcome
}

/// Takes a sandbox to a checkpoint; without a name, back to the one that it stands on.
pub async fn check_out(
    app: &Arc<App>,
    owner: &str,
    id: &str,
    name: Option<String>,
) -> Result<(), ApiError> {
    let begun = Instant::now();
    let (verb, what) = match &name {
        Some(name) => ("checkout", name.clone()),
        None => ("rollback", String::new()),
    };
    let work = to_the_end(checked_out(Arc::clone(app), id.to_owned(), name));
    let outcome = app.metrics.timed(Operation::Rollback, work).await;
    app.audit.write(&Act::new(verb, owner, id).what(&what).since(begun).outcome(&outcome));
    outcome
}

/// Lists the checkpoints of a sandbox, oldest first. One that hibernates has none, and sleeps on.
pub async fn list_checkpoints(app: &Arc<App>, id: &str) -> Result<Vec<Checkpoint>, ApiError> {
    if app.find(id)?.row().state == SandboxState::Hibernated {
        return Ok(Vec::new());
    }
    let in_use = enter(app, id).await?;
    let entry = Arc::clone(in_use.entry());
    let all = app.blocking.run(Work::Short, move || Ok(in_use.vm().checkpoints()?)).await?;
    entry.lock().checkpoints.clone_from(&all);
    Ok(all)
}

/// Lists the files that differ between two moments of a sandbox. Two copies of it exist meanwhile,
/// and count as sandboxes of the owner.
pub async fn diff_files(
    app: &Arc<App>,
    owner: &str,
    id: &str,
    options: DiffOptions,
) -> Result<FileDiff, ApiError> {
    let begun = Instant::now();
    let what = format!("{} {}", options.from, options.to.as_deref().unwrap_or("now"));
    let outcome = to_the_end(compared(Arc::clone(app), owner.to_owned(), id.to_owned(), options));
    let outcome = outcome.await;
    app.audit.write(&Act::new("diff", owner, id).what(&what).since(begun).outcome(&outcome));
    outcome
}

async fn compared(
    app: Arc<App>,
    owner: String,
    id: String,
    options: DiffOptions,
) -> Result<FileDiff, ApiError> {
    let in_use = enter(&app, &id).await?;
    in_use.require_awake()?;
    let memory_mib = in_use.row().memory_mib.saturating_mul(2);
    let _reserved =
        app.admission.reserve(&owner, app.used_by(&owner), Use { sandboxes: 2, memory_mib })?;
    app.blocking.run(Work::Long, move || Ok(in_use.vm().diff(&options)?)).await
}

/// `POST /v1/sandboxes/{id}/checkpoint`
pub async fn checkpoint(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<Take>,
) -> Result<(StatusCode, axum::Json<Value>), ApiError> {
    let taken = take_checkpoint(&app, &owner, &id, body.name).await?;
    Ok((StatusCode::CREATED, axum::Json(shape(&taken))))
}

/// `GET /v1/sandboxes/{id}/checkpoints`
pub async fn list(State(app): State<Arc<App>>, Id(id): Id) -> Result<axum::Json<Value>, ApiError> {
    let all = list_checkpoints(&app, &id).await?;
    Ok(axum::Json(json!({ "items": all.iter().map(shape).collect::<Vec<_>>() })))
}

/// `DELETE /v1/sandboxes/{id}/checkpoints/{name}`
pub async fn delete(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Name(name): Name,
) -> Result<StatusCode, ApiError> {
    let begun = Instant::now();
    let outcome = to_the_end(deleted(Arc::clone(&app), id.clone(), name.clone())).await;
    let act = Act::new("delete_checkpoint", &owner, &id).what(&name).since(begun);
    app.audit.write(&act.outcome(&outcome));
    outcome.map(|()| StatusCode::NO_CONTENT)
}

/// `POST /v1/sandboxes/{id}/checkout`
pub async fn checkout(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<GoTo>,
) -> Result<StatusCode, ApiError> {
    check_out(&app, &owner, &id, Some(body.name)).await.map(|()| StatusCode::NO_CONTENT)
}

/// `POST /v1/sandboxes/{id}/rollback`
pub async fn rollback(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
) -> Result<StatusCode, ApiError> {
    check_out(&app, &owner, &id, None).await.map(|()| StatusCode::NO_CONTENT)
}

/// `GET /v1/sandboxes/{id}/diff`
pub async fn diff(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Queried(moments): Queried<Moments>,
) -> Result<Response, ApiError> {
    let root = PathBuf::from(moments.path.unwrap_or_else(|| "/".to_owned()));
    if !root.is_absolute() {
        return Err(ApiError::bad_request("path: use an absolute path, such as /etc"));
    }
    let to = moments.to.filter(|to| !to.is_empty());
    let options = DiffOptions {
        root,
        patch: moments.patch,
        ..DiffOptions::between(&moments.from, to.as_deref())
    };
    app.find(&id)?;
    let work = async move {
        let diff = diff_files(&app, &owner, &id, options).await?;
        serde_json::to_value(&diff).map_err(|error| ApiError::internal(error.to_string()))
    };
    Ok(sse::slow_json(StatusCode::OK, work, ApiError::json).await)
}
