//! `/v1/sandboxes/{id}/checkpoint` and `/rollback`.
//!
//! A rollback cuts off requests that run in the sandbox: their connections are of the state that is
//! left.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;

use crate::app::App;
use crate::audit::Act;
use crate::blocking::{Work, to_the_end};
use crate::error::ApiError;
use crate::extract::{Id, Owner};
use crate::life::enter;

async fn checkpointed(app: Arc<App>, id: String) -> Result<(), ApiError> {
    let in_use = enter(&app, &id).await?;
    in_use.require_awake()?;
    let entry = Arc::clone(in_use.entry());
    let _change = entry.change.lock().await;
    let vm = in_use.vm().clone();
    app.blocking.run(Work::Long, move || Ok(vm.checkpoint()?)).await?;
    let mut fields = entry.lock();
    fields.row.has_checkpoint = true;
    app.store.put_sandboxes(&[&fields.row])?;
    Ok(())
}

async fn rolled_back(app: Arc<App>, id: String) -> Result<(), ApiError> {
    let in_use = enter(&app, &id).await?;
    in_use.require_awake()?;
    let entry = Arc::clone(in_use.entry());
    let _change = entry.change.lock().await;
    if !entry.lock().row.has_checkpoint {
        return Err(ApiError::conflict("the sandbox has no checkpoint to go back to"));
    }
    let vm = in_use.vm().clone();
    app.blocking.run(Work::Long, move || Ok(vm.rollback()?)).await
}

/// Keeps the present state of a sandbox.
pub async fn take_checkpoint(app: &Arc<App>, owner: &str, id: &str) -> Result<(), ApiError> {
    let begun = Instant::now();
    let outcome = to_the_end(checkpointed(Arc::clone(app), id.to_owned())).await;
    app.audit.write(&Act::new("checkpoint", owner, id).since(begun).outcome(&outcome));
    outcome
}

/// Takes a sandbox back to its checkpoint.
pub async fn roll_back(app: &Arc<App>, owner: &str, id: &str) -> Result<(), ApiError> {
    let begun = Instant::now();
    let outcome = to_the_end(rolled_back(Arc::clone(app), id.to_owned())).await;
    app.audit.write(&Act::new("rollback", owner, id).since(begun).outcome(&outcome));
    outcome
}

/// `POST /v1/sandboxes/{id}/checkpoint`
pub async fn checkpoint(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
) -> Result<StatusCode, ApiError> {
    take_checkpoint(&app, &owner, &id).await.map(|()| StatusCode::NO_CONTENT)
}

/// `POST /v1/sandboxes/{id}/rollback`
pub async fn rollback(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
) -> Result<StatusCode, ApiError> {
    roll_back(&app, &owner, &id).await.map(|()| StatusCode::NO_CONTENT)
}
