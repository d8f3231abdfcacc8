//! `/v1/sandboxes/{id}/hibernate` and `/wake`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::json;

use crate::app::App;
use crate::audit::Act;
use crate::error::ApiError;
use crate::extract::{Id, Owner};
use crate::life;
use crate::sse;

/// `POST /v1/sandboxes/{id}/hibernate`
pub async fn hibernate(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let entry = app.find(&id)?;
    let work = async move {
        let begun = Instant::now();
        let outcome = life::hibernate(&app, &entry).await;
        app.audit.write(&Act::new("hibernate", &owner, &id).since(begun).outcome(&outcome));
        outcome.map(|()| json!({ "id": id, "status": "hibernated" }))
    };
    Ok(sse::slow_json(StatusCode::OK, work, ApiError::json).await)
}

/// `POST /v1/sandboxes/{id}/wake`
pub async fn wake(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
) -> Result<Response, ApiError> {
    let entry = app.find(&id)?;
    let work = async move {
        let begun = Instant::now();
        let outcome = life::wake(&app, &entry).await;
        app.audit.write(&Act::new("wake", &owner, &id).since(begun).outcome(&outcome));
        outcome.map(|()| json!({ "id": id, "status": entry.row().state.word() }))
    };
    Ok(sse::slow_json(StatusCode::OK, work, ApiError::json).await)
}
