//! `/metrics`: numbers for operators, as Prometheus reads them.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::error::ApiError;
use crate::extract::Owner;
use crate::metrics::MEDIA_TYPE;

/// `GET /metrics`
pub async fn metrics(State(app): State<Arc<App>>, _: Owner) -> Result<Response, ApiError> {
    app.count_denials().await?;
    let sample = app.sample().await?;
    let text = app.metrics.text(&sample)?;
    Ok(([(header::CONTENT_TYPE, MEDIA_TYPE)], text).into_response())
}
