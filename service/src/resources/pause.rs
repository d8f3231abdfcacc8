//! `/v1/sandboxes/{id}/pause` and `/resume`. Both may be repeated.

use std::sync::Arc;

use axum::extract::State as Shared;
use axum::http::StatusCode;

use crate::app::App;
use crate::audit::Act;
use crate::blocking::{Work, to_the_end};
use crate::error::ApiError;
use crate::extract::{Id, Owner};
use crate::life::enter;
use crate::store::State;

async fn change(app: Arc<App>, id: String, to: State) -> Result<(), ApiError> {
    let in_use = enter(&app, &id).await?;
    let entry = Arc::clone(in_use.entry());
    let _change = entry.change.lock().await;
    if entry.lock().row.state == to {
        return Ok(());
    }
    let (vm, sandboxes) = (in_use.vm().clone(), app.sandboxes.clone());
    let work = move || {
        match to {
            State::Paused => vm.pause()?,
            _ => vm.resume()?,
        }
        // The handle has the state in which the VM was found.
        Ok(sandboxes.get(vm.id())?)
    };
    let vm = app.blocking.run(Work::Short, work).await?;
    let mut fields = entry.lock();
    fields.row.state = to;
    fields.vm = Some(vm).filter(|_| !fields.ended);
    app.store.put_sandboxes(&[&fields.row])?;
    Ok(())
}

/// `POST /v1/sandboxes/{id}/pause`
pub async fn pause(
    Shared(app): Shared<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
) -> Result<StatusCode, ApiError> {
    let outcome = to_the_end(change(Arc::clone(&app), id.clone(), State::Paused)).await;
    app.audit.write(&Act::new("pause", &owner, &id).outcome(&outcome));
    outcome.map(|()| StatusCode::NO_CONTENT)
}

/// `POST /v1/sandboxes/{id}/resume`
pub async fn resume(
    Shared(app): Shared<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
) -> Result<StatusCode, ApiError> {
    let outcome = to_the_end(change(Arc::clone(&app), id.clone(), State::Running)).await;
    app.audit.write(&Act::new("resume", &owner, &id).outcome(&outcome));
    outcome.map(|()| StatusCode::NO_CONTENT)
}
