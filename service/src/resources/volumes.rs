//! `/v1/volumes`: disks with a name, which outlive the sandboxes that they are in.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use pvmm_sandbox::volumes::{Volume, Volumes};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::audit::Act;
use crate::blocking::Work;
use crate::clock;
use crate::error::ApiError;
use crate::extract::{Json, Name, Owner, shown};
use crate::ids;

const MAX_SIZE_MIB: u64 = 64 << 10;

/// The body of a new volume.
#[derive(Debug, Deserialize)]
pub struct Create {
    name: String,
    size_mb: i64,
}

/// Returns the sandboxes that a volume is in, hibernated ones too.
fn attached_to(app: &App, name: &str) -> Vec<String> {
    let uses = |row: &crate::store::SandboxRow| row.volumes.iter().any(|use_| use_.name == name);
    app.list().iter().map(|entry| entry.row()).filter(uses).map(|row| row.id).collect()
}

fn shape(app: &App, volume: &Volume) -> Value {
    json!({
        "name": volume.name,
        "size_mb": volume.bytes >> 20,
        "disk_mb": volume.disk_bytes >> 20,
        "created_at": clock::rfc3339(volume.created * 1000),
        "attached_to": attached_to(app, &volume.name),
        "in_use": volume.in_use,
    })
}

/// `POST /v1/volumes`
pub async fn create(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Json(body): Json<Create>,
) -> Result<Response, ApiError> {
    if !ids::is_name(&body.name) {
        let message = format!("name: '{}' cannot name a volume", shown(&body.name));
        return Err(ApiError::bad_request(message));
    }
    let size = u64::try_from(body.size_mb).unwrap_or(0);
    if !(1..=MAX_SIZE_MIB).contains(&size) {
        let message = format!("size_mb: use a number from 1 to {MAX_SIZE_MIB}");
        return Err(ApiError::bad_request(message));
    }
    app.admission.require_disk()?;
    let name = body.name.clone();
    let work = move || Ok(Volumes::open()?.create(&name, size << 20)?);
    let outcome = app.blocking.run(Work::Long, work).await;
    app.audit.write(&Act::new("create_volume", &owner, "").what(&body.name).outcome(&outcome));
    Ok((StatusCode::CREATED, axum::Json(shape(&app, &outcome?))).into_response())
}

/// `GET /v1/volumes`
pub async fn list(State(app): State<Arc<App>>, _: Owner) -> Result<axum::Json<Value>, ApiError> {
    let work = || Ok(Volumes::open()?.list()?);
    let volumes = app.blocking.run(Work::Short, work).await?;
    Ok(axum::Json(volumes.iter().map(|volume| shape(&app, volume)).collect()))
}

/// `GET /v1/volumes/{name}`
pub async fn get(
    State(app): State<Arc<App>>,
    _: Owner,
    Name(name): Name,
) -> Result<axum::Json<Value>, ApiError> {
    let work = move || Ok(Volumes::open()?.get(&name)?);
    let volume = app.blocking.run(Work::Short, work).await?;
    Ok(axum::Json(shape(&app, &volume)))
}

/// `DELETE /v1/volumes/{name}`
pub async fn delete(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Name(name): Name,
) -> Result<StatusCode, ApiError> {
    if let Some(id) = attached_to(&app, &name).first() {
        return Err(ApiError::conflict(format!("volume '{name}' is in sandbox {id}")));
    }
    let removed = name.clone();
    let work = move || Ok(Volumes::open()?.remove(&removed)?);
    let outcome = app.blocking.run(Work::Long, work).await;
    app.audit.write(&Act::new("delete_volume", &owner, "").what(&name).outcome(&outcome));
    outcome.map(|()| StatusCode::NO_CONTENT)
}
