//! Errors as E2B's clients read them: a number and a line, or a word of Connect and a line.

use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::extract::Json;

/// An error with the number of its status.
#[derive(Debug)]
pub struct Refused(pub ApiError);

impl From<ApiError> for Refused {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let Self(error) = self;
        let body = json!({ "code": error.status.as_u16(), "message": error.message });
        let mut response = (error.status, axum::Json(body)).into_response();
        if let Some(seconds) = error.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// A part of a request whose error is told in E2B's form.
pub struct Checked<T>(pub T);

impl<S: Send + Sync, T: FromRequestParts<S, Rejection = ApiError>> FromRequestParts<S>
    for Checked<T>
{
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refused> {
        Ok(Self(T::from_request_parts(parts, state).await?))
    }
}

/// A JSON body whose error is told in E2B's form.
pub struct CheckedJson<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for CheckedJson<T> {
    type Rejection = Refused;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refused> {
        let Json(body) = Json::from_request(request, state).await?;
        Ok(Self(body))
    }
}

/// An error of a call, with the word that Connect has for it.
#[derive(Debug)]
pub struct CallError {
    word: &'static str,
    message: String,
}

impl CallError {
    /// Builds an error with a word of its own.
    pub fn new(word: &'static str, message: impl Into<String>) -> Self {
        Self { word, message: message.into() }
    }

    /// Returns the error as the JSON that is sent.
    pub fn json(&self) -> Value {
        json!({ "code": self.word, "message": self.message })
    }

    fn status(&self) -> StatusCode {
        match self.word {
            "invalid_argument" | "failed_precondition" => StatusCode::BAD_REQUEST,
            "unauthenticated" => StatusCode::UNAUTHORIZED,
            "not_found" => StatusCode::NOT_FOUND,
            "already_exists" => StatusCode::CONFLICT,
            "resource_exhausted" => StatusCode::TOO_MANY_REQUESTS,
            "unimplemented" => StatusCode::NOT_IMPLEMENTED,
            "unavailable" => StatusCode::SERVICE_UNAVAILABLE,
            "deadline_exceeded" => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl From<ApiError> for CallError {
    fn from(error: ApiError) -> Self {
        let word = match error.code {
            // The clients know by these words that the sandbox is gone, and not a file in it.
            "not_found" if error.message.starts_with("sandbox '") => {
                return Self::new("unavailable", GONE);
            }
            "bad_request" => "invalid_argument",
            "unauthorized" => "unauthenticated",
            "not_found" => "not_found",
            "conflict" => "failed_precondition",
            "too_large" | "too_many" | "disk_full" => "resource_exhausted",
            "unavailable" => "unavailable",
            "not_implemented" | "method_not_allowed" => "unimplemented",
            "timeout" => "deadline_exceeded",
            _ => "internal",
        };
        Self::new(word, error.message)
    }
}

impl From<pvmm::exec::ExecError> for CallError {
    fn from(error: pvmm::exec::ExecError) -> Self {
        ApiError::from(error).into()
    }
}

impl From<pvmm::agent::AgentError> for CallError {
    fn from(error: pvmm::agent::AgentError) -> Self {
        ApiError::from(error).into()
    }
}

impl IntoResponse for CallError {
    fn into_response(self) -> Response {
        (self.status(), axum::Json(self.json())).into_response()
    }
}

/// The words by which the clients know that a sandbox has ended.
pub const GONE: &str = "the sandbox was not found";

/// Answers a request to a sandbox that does not run.
pub fn gone() -> Response {
    let body = json!({ "code": 502, "message": GONE });
    (StatusCode::BAD_GATEWAY, axum::Json(body)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_file_and_ended_sandbox_are_told_apart() {
        let file = CallError::from(ApiError::not_found("stat: No such file or directory"));
        assert_eq!((file.word, file.status()), ("not_found", StatusCode::NOT_FOUND));
        let sandbox = CallError::from(ApiError::not_found("sandbox 'x' not found: it has ended"));
        assert_eq!(sandbox.json(), json!({ "code": "unavailable", "message": GONE }));
    }

    #[test]
    fn refusal_keeps_its_status_and_when_to_try_again() {
        let response = Refused(ApiError::unavailable("busy", 5)).into_response();
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "5");
    }
}
