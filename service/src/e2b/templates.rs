//! Templates: which there are, and the end of one. A snapshot counts as one, too.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use pvmm_sandbox::CreateOptions;
use serde_json::{Value, json};

use crate::blocking::Work;
use crate::clock;
use crate::error::{ApiError, chain};
use crate::extract::{Id, Name, Owner};
use crate::ids;
use crate::resources::{snapshots, templates};

use super::error::{Checked, Refused};
use super::sandboxes::{ENVD_VERSION, template_of};
use super::state::Door;

fn shape(template: &pvmm_images::Template) -> Value {
    let (manifest, size) = (&template.manifest, CreateOptions::of(template.name()));
    let created = clock::rfc3339(manifest.created.saturating_mul(1000));
    json!({
        "templateID": manifest.name,
        "buildID": manifest.digest,
        "cpuCount": size.cpus,
        "memoryMB": size.memory_mib,
        "diskSizeMB": size.disk_mib,
        "public": false,
        "aliases": [manifest.name],
        "names": [manifest.name],
        "createdAt": created,
        "updatedAt": created,
        "createdBy": null,
        "lastSpawnedAt": null,
        "spawnCount": 0,
        "buildCount": 1,
        "envdVersion": ENVD_VERSION,
        "buildStatus": "ready",
    })
}

fn all() -> Result<Vec<pvmm_images::Template>, ApiError> {
    let failed = |error: &dyn std::error::Error| ApiError::internal(chain(error));
    let cache = pvmm_images::Cache::open().map_err(|error| failed(&error))?;
    pvmm_images::Template::list(&cache).map_err(|error| failed(&error))
}

/// `GET /templates`
pub async fn list(State(door): State<Arc<Door>>) -> Result<axum::Json<Value>, Refused> {
    let templates = door.app.blocking.run(Work::Short, all).await?;
    Ok(axum::Json(templates.iter().map(shape).collect()))
}

/// `GET /templates/aliases/{name}`
pub async fn alias(
    State(door): State<Arc<Door>>,
    Checked(Name(name)): Checked<Name>,
) -> Result<axum::Json<Value>, Refused> {
    let name = template_of(&name).to_owned();
    let templates = door.app.blocking.run(Work::Short, all).await?;
    if !templates.iter().any(|template| template.name() == name) {
        return Err(ApiError::not_found(format!("template '{name}' not found")).into());
    }
    Ok(axum::Json(json!({ "templateID": name, "public": false })))
}

/// `DELETE /templates/{name}`
pub async fn delete(
    State(door): State<Arc<Door>>,
    owner: Owner,
    Checked(Name(name)): Checked<Name>,
) -> Result<StatusCode, Refused> {
    let app = State(Arc::clone(&door.app));
    if ids::is_id(&name) {
        snapshots::delete(app, owner, Id(name)).await?;
    } else {
        templates::delete(app, owner, Name(name)).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}
