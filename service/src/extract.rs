//! The parts of a request that handlers take: ids, bodies, queries, the token's owner.
//!
//! Each part is checked here, and a bad one is answered with a JSON error that names it.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, FromRequestParts, Query, RawPathParams, Request};
use axum::http::HeaderMap;
use axum::http::request::Parts;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use crate::error::ApiError;
use crate::ids;

/// The largest JSON body.
pub const MAX_JSON: usize = 4 << 20;
/// How long a client may take to send a JSON body.
const BODY_TIME: Duration = Duration::from_secs(60);

/// The prefix of the token that a request carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Owner {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let owner = parts.extensions.get::<Self>().cloned();
        owner.ok_or_else(|| ApiError::unauthorized("send a token: Authorization: Bearer TOKEN"))
    }
}

async fn parameter<S: Send + Sync>(
    parts: &mut Parts,
    state: &S,
    name: &str,
) -> Result<String, ApiError> {
    let bad = |_| ApiError::bad_request("the path is not text");
    let params = RawPathParams::from_request_parts(parts, state).await.map_err(bad)?;
    let found = params.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_owned());
    found.ok_or_else(|| ApiError::internal("the path has no such part"))
}

/// The id in a path, as in `/v1/sandboxes/{id}`.
pub struct Id(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let id = parameter(parts, state, "id").await?;
        if ids::is_id(&id) {
            Ok(Self(id))
        } else {
            Err(ApiError::not_found(format!("'{}' not found", shown(&id))))
        }
    }
}

/// The name in a path, as in `/v1/volumes/{name}`.
pub struct Name(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let name = parameter(parts, state, "name").await?;
        if ids::is_name(&name) {
            Ok(Self(name))
        } else {
            Err(ApiError::not_found(format!("'{}' not found", shown(&name))))
        }
    }
}

/// The second id in a path, as in `/v1/sandboxes/{id}/repl/sessions/{session}`.
pub struct Session(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Session {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let session = parameter(parts, state, "session").await?;
        if ids::is_name(&session) {
            Ok(Self(session))
        } else {
            Err(ApiError::not_found(format!("session '{}' not found", shown(&session))))
        }
    }
}

/// Returns the text of a header.
pub fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Shortens and escapes a part of a request for a message.
pub fn shown(text: &str) -> String {
    text.chars().take(80).collect::<String>().escape_debug().to_string()
}

/// A JSON body. An empty one counts as `{}`, whatever its type is said to be.
pub struct Json<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let bytes = collect(request.into_body(), MAX_JSON).await?;
        let bytes = match bytes.trim_ascii_start() {
            [] => b"{}",
            // serde would take the fields from an array, too.
            [b'[', ..] => return Err(ApiError::bad_request("the body: it must be an object")),
            _ => &bytes[..],
        };
        let parsed = serde_json::from_slice(bytes);
        parsed.map(Self).map_err(|error| ApiError::bad_request(format!("the body: {error}")))
    }
}

/// Reads a whole body of at most `limit` bytes.
pub async fn collect(body: Body, limit: usize) -> Result<bytes::Bytes, ApiError> {
    let whole = tokio::time::timeout(BODY_TIME, Limited::new(body, limit).collect()).await;
    match whole {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err(ApiError::too_large(format!("the body is longer than {limit} bytes")))
        }
        Ok(Err(_)) => Err(ApiError::bad_request("the body was cut short")),
        Err(_) => Err(ApiError::bad_request("the body took too long")),
    }
}

/// The query of a request.
pub struct Queried<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Queried<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(query)) => Ok(Self(query)),
            Err(error) => Err(ApiError::bad_request(format!("the query: {}", error.body_text()))),
        }
    }
}
