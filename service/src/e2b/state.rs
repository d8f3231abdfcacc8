//! The state that E2B's handlers share, and the sandbox that a request is for.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use crate::app::App;
use crate::error::ApiError;
use crate::ids;

use super::collected::Watchers;
use super::error::Refused;
use super::inputs::Inputs;
use super::token::Key;

/// The name of the key in the database.
const KEY: &str = "e2b-key";

/// The state that E2B's handlers share.
pub struct Door {
    /// The state of the whole server.
    pub app: Arc<App>,
    key: Option<Key>,
    /// The open standard inputs of processes.
    pub inputs: Inputs,
    /// The watches of directories.
    pub watchers: Arc<Watchers>,
}

impl Door {
    /// Assembles the state, with the key that the data directory has or gets now.
    pub fn open(app: Arc<App>) -> Self {
        let key = match ids::new_token() {
            Ok(new) => app.store.fact(KEY, || new).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = &key {
            log::error!("E2B's API: no key: {error}");
        }
        let key = key.ok().map(Key::from_text);
        Self { app, key, inputs: Inputs::default(), watchers: Arc::default() }
    }

    /// Returns the key of the sandboxes' credentials.
    pub fn key(&self) -> Result<&Key, ApiError> {
        self.key.as_ref().ok_or_else(|| ApiError::internal("the server has no key for sandboxes"))
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
