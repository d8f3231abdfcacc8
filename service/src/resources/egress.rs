//! `/v1/sandboxes/{id}/egress`: the rules for the network of a sandbox, which hold at once.

use std::sync::Arc;

use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::audit::Act;
use crate::blocking::{Work, to_the_end};
use crate::error::ApiError;
use crate::extract::{Id, Json, Owner};
use crate::life::{egress_of, enter};

use super::sandboxes::check_rules;

/// The body of a change.
#[derive(Debug, Deserialize)]
pub struct Rules {
    egress_allowlist: Vec<String>,
}

/// `GET /v1/sandboxes/{id}/egress`
pub async fn get(
    State(app): State<Arc<App>>,
    _: Owner,
    Id(id): Id,
) -> Result<axum::Json<Value>, ApiError> {
    Ok(axum::Json(json!({ "egress_allowlist": app.find(&id)?.row().egress })))
}

/// Sets the rules of a sandbox that has a network card.
pub async fn set(app: Arc<App>, id: String, rules: Vec<String>) -> Result<Value, ApiError> {
    check_rules(&rules)?;
    let policy = egress_of(&rules)?.policy;
    let in_use = enter(&app, &id).await?;
    let entry = Arc::clone(in_use.entry());
    let _change = entry.change.lock().await;
    if entry.lock().row.egress.is_none() {
        let message = "the sandbox has no network card: create one with an egress_allowlist";
        return Err(ApiError::conflict(message));
    }
    app.blocking.run(Work::Short, move || Ok(in_use.vm().set_egress(&policy)?)).await?;
    let mut fields = entry.lock();
    fields.row.egress = Some(rules.clone());
    app.store.put_sandboxes(&[&fields.row])?;
    Ok(json!({ "egress_allowlist": rules }))
}

/// `PUT /v1/sandboxes/{id}/egress`
pub async fn put(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Id(id): Id,
    Json(body): Json<Rules>,
) -> Result<axum::Json<Value>, ApiError> {
    let what = body.egress_allowlist.join(" ");
    let work = set(Arc::clone(&app), id.clone(), body.egress_allowlist);
    let outcome = to_the_end(work).await;
    app.audit.write(&Act::new("egress", &owner, &id).what(&what).outcome(&outcome));
    outcome.map(axum::Json)
}
