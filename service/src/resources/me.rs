//! `/v1/me` and `/v1/me/tokens`.

use std::sync::Arc;

use axum::extract::{RawPathParams, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::audit::Act;
use crate::clock;
use crate::error::ApiError;
use crate::extract::{Json, Owner};
use crate::store::TokenRow;

const MAX_LABEL: usize = 200;
const MAX_DAYS: i64 = 3650;

/// The body of a new token.
#[derive(Debug, Default, Deserialize)]
pub struct Create {
    label: Option<String>,
    expires_in_days: Option<i64>,
}

fn shape(row: &TokenRow) -> Value {
    json!({
        "prefix": row.prefix,
        "label": row.label,
        "name": row.label,
        "created_at": clock::rfc3339(row.created_ms),
        "expires_at": row.expires_ms.map(clock::rfc3339),
    })
}

/// `GET /v1/me`
pub async fn me(State(app): State<Arc<App>>, Owner(owner): Owner) -> axum::Json<Value> {
    let (limits, used) = (app.admission.limits(), app.used_by(&owner));
    axum::Json(json!({
        "id": owner,
        "name": "pvmm",
        "workspace": "local",
        "limits": {
            "sandboxes": limits.sandboxes,
            "memory_mb": limits.memory_mib,
            "creates_per_second": limits.creates_per_second,
        },
        "usage": { "sandboxes": used.sandboxes, "memory_mb": used.memory_mib },
    }))
}

/// `GET /v1/me/tokens`
pub async fn tokens(State(app): State<Arc<App>>, _: Owner) -> axum::Json<Value> {
    axum::Json(app.tokens.list().iter().map(shape).collect())
}

/// `POST /v1/me/tokens`
pub async fn create_token(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    Json(body): Json<Create>,
) -> Result<Response, ApiError> {
    let label = body.label.unwrap_or_default();
    if label.chars().count() > MAX_LABEL {
        return Err(ApiError::bad_request("label: at most 200 characters"));
    }
    let expires_ms = match body.expires_in_days {
        None => None,
        Some(days) if (1..=MAX_DAYS).contains(&days) => {
            Some(clock::now_ms() + days.unsigned_abs() * 86_400_000)
        }
        Some(_) => return Err(ApiError::bad_request("expires_in_days: use 1 to 3650")),
    };
    let outcome = app.tokens.make(&app.store, &label, expires_ms);
    app.audit.write(&Act::new("create_token", &owner, "").what(&label).outcome(&outcome));
    let (token, row) = outcome?;
    let mut value = shape(&row);
    value["token"] = json!(token);
    Ok((StatusCode::CREATED, axum::Json(value)).into_response())
}

/// `DELETE /v1/me/tokens/{prefix}`
pub async fn revoke_token(
    State(app): State<Arc<App>>,
    Owner(owner): Owner,
    params: RawPathParams,
) -> Result<StatusCode, ApiError> {
    let prefix = params.iter().find(|(name, _)| *name == "prefix").map(|(_, value)| value);
    let prefix = prefix.unwrap_or_default();
    let outcome = app.tokens.revoke(&app.store, prefix);
    app.audit.write(&Act::new("revoke_token", &owner, "").what(prefix).outcome(&outcome));
    outcome.map(|()| StatusCode::NO_CONTENT)
}
