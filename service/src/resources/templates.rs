//! `/v1/templates`: the templates that sandboxes are made from.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use pvmm_images::progress::Silent;
use pvmm_images::{Cache, Template, template};
use pvmm_sandbox::CreateOptions;
use serde_json::{Value, json};

use crate::app::App;
use crate::audit::Act;
use crate::blocking::Work;
use crate::clock;
use crate::error::{ApiError, chain};
use crate::extract::{Name, Owner};

fn cache() -> Result<Cache, ApiError> {
    Cache::open().map_err(|error| ApiError::internal(chain(&error)))
}

fn shape(template: &Template) -> Value {
    let (manifest, size) = (&template.manifest, CreateOptions::of(template.name()));
    json!({
        "name": manifest.name,
        "rootfs_path": template.rootfs,
        "size_bytes": manifest.image_bytes,
        "cpu": size.cpus,
        "memory_mb": size.memory_mib,
        "is_global": manifest.name == template::BASE,
        "workspace": "local",
        "description": manifest.system,
        "tools": manifest.recipe.packages,
        "meta": { "digest": manifest.digest, "created_at": clock::rfc3339(manifest.created * 1000) },
    })
}

/// `GET /v1/templates`
pub async fn list(State(app): State<Arc<App>>, _: Owner) -> Result<axum::Json<Value>, ApiError> {
    let work = || Template::list(&cache()?).map_err(|error| ApiError::internal(chain(&error)));
    let templates = app.blocking.run(Work::Short, work).await?;
    Ok(axum::Json(templates.iter().map(shape).collect()))
}

fn find(name: &str) -> Result<Template, ApiError> {
    let unknown = |_| ApiError::not_found(format!("template '{name}' not found"));
    Template::find(&cache()?, name).map_err(unknown)
}

/// `GET /v1/templates/{name}`
pub async fn get(
    State(app): State<Arc<App>>,
    _: Owner,
    Name(name): Name,
) -> Result<axum::Json<Value>, ApiError> {
    let template = app.blocking.run(Work::Short, move || find(&name)).await?;
    Ok(axum::Json(shape(&template)))
}

/// `DELETE /v1/templates/{name}`
pub async fn delete(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Name(name): Name,
) -> Result<StatusCode, ApiError> {
    if name == template::BASE {
        return Err(ApiError::conflict("template 'base' is built in"));
    }
    if app.list().iter().any(|entry| entry.row().template == name) {
        return Err(ApiError::conflict(format!("template '{name}' is in use by a sandbox")));
    }
    if app.store.snapshots()?.iter().any(|row| row.template == name) {
        return Err(ApiError::conflict(format!("template '{name}' is in use by a snapshot")));
    }
    let removed = name.clone();
    let work = move || {
        find(&removed)?;
        Template::remove(&cache()?, &removed, &mut Silent)
            .map_err(|error| ApiError::conflict(chain(&error)))
    };
    let outcome = app.blocking.run(Work::Long, work).await;
    app.audit.write(&Act::new("delete_template", &owner, "").what(&name).outcome(&outcome));
    outcome.map(|_| StatusCode::NO_CONTENT)
}
