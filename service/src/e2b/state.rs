//! The state that E2B's handlers share, and the sandbox that a request is for.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use crate::app::App;
use crate::error::ApiError;

use super::collected::Watchers;
use super::error::Refused;
use super::inputs::Inputs;

/// The state that E2B's handlers share.
pub struct Door {
    /// The state of the whole server.
    pub app: Arc<App>,
    /// The open standard inputs of processes.
    pub inputs: Inputs,
    /// The watches of directories.
    pub watchers: Arc<Watchers>,
}

impl Door {
    /// Assembles the state.
    pub fn open(app: Arc<App>) -> Self {
        Self { app, inputs: Inputs::default(), watchers: Arc::default() }
    }
}

/// The sandbox that a request to a guest is for.
#[derive(Clone, Debug)]
pub struct Target(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Target {
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refused> {
        let target = parts.extensions.get::<Self>().cloned();
        target.ok_or_else(|| Refused(ApiError::internal("the request names no sandbox")))
    }
}
