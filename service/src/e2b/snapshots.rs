//! Snapshots: states of sandboxes that others begin with, under the names of templates.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::audit::Act;
use crate::blocking::to_the_end;
use crate::error::ApiError;
use crate::extract::{Id, Owner, Queried};
use crate::resources::snapshots;
use crate::store::SnapshotRow;

use super::error::{Checked, CheckedJson, Refused};
use super::sandboxes::page;
use super::state::Door;

/// The body of a new snapshot.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Create {
    name: Option<String>,
    memory: Option<bool>,
}

/// The query of a listing.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Wanted {
    #[serde(rename = "sandboxID")]
    sandbox_id: Option<String>,
    name: Option<String>,
    limit: Option<usize>,
    next_token: Option<usize>,
}

fn shape(row: &SnapshotRow) -> Value {
    json!({ "snapshotID": row.id, "names": [] })
}

/// `POST /sandboxes/{id}/snapshots`
pub async fn create(
    State(door): State<Arc<Door>>,
    Owner(owner): Owner,
    Checked(Id(id)): Checked<Id>,
    CheckedJson(body): CheckedJson<Create>,
) -> Result<Response, Refused> {
    if body.name.is_some() {
        let message = "name: a snapshot has an id only; use it as the template";
        return Err(ApiError::not_implemented(message).into());
    }
    let disk_only = body.memory == Some(false);
    door.app.find(&id)?;
    let begun = Instant::now();
    let (app, of, by) = (Arc::clone(&door.app), id.clone(), owner.clone());
    let outcome = to_the_end(async move { snapshots::take(&app, &of, &by, disk_only).await }).await;
    door.app.audit.write(&Act::new("snapshot", &owner, &id).since(begun).outcome(&outcome));
    Ok((StatusCode::CREATED, axum::Json(shape(&outcome?))).into_response())
}

/// `GET /snapshots`
pub async fn list(
    State(door): State<Arc<Door>>,
    Checked(Queried(wanted)): Checked<Queried<Wanted>>,
) -> Result<Response, Refused> {
    let rows = door.app.store.snapshots().map_err(ApiError::from)?;
    let is_wanted =
        |row: &SnapshotRow| wanted.sandbox_id.as_ref().is_none_or(|id| *id == row.sandbox);
    let mut rows: Vec<_> = rows.into_iter().filter(is_wanted).collect();
    // Snapshots have no names, so none has this one.
    rows.retain(|_| wanted.name.is_none());
    rows.sort_by_key(|row| std::cmp::Reverse(row.created_ms));
    Ok(page(rows.iter().map(shape).collect(), wanted.next_token, wanted.limit))
}
