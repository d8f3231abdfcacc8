//! `/v1/pool` and `/healthz`: how many sandboxes there are, and whether the server lives.

use std::sync::Arc;

use axum::extract::State;
use serde_json::{Value, json};

use crate::app::App;
use crate::extract::Owner;

/// `GET /v1/pool`: the sandboxes that the token may have, has, and may still start, and the
/// processes that wait for the next ones.
pub async fn pool(State(app): State<Arc<App>>, Owner(owner): Owner) -> axum::Json<Value> {
    let total = u64::from(app.admission.limits().sandboxes);
    let in_use = app.used_by(&owner).sandboxes;
    let available = total.saturating_sub(in_use);
    let (waiting, wanted) = app.sandboxes.prepared();
    let prepared = json!({ "total": wanted, "available": waiting });
    axum::Json(json!({
        "total": total,
        "available": available,
        "in_use": in_use,
        "prepared": prepared,
    }))
}

/// `GET /healthz`
pub async fn healthz() -> axum::Json<Value> {
    axum::Json(json!({ "status": "ok", "version": env!("CARGO_PKG_VERSION") }))
}
