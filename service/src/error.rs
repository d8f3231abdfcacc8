//! Errors as clients get them: a status, one line, and when to try again.
//!
//! Each kind of failure below the service is mapped here, so that no handler picks a status for a
//! failure that it did not find itself.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pvmm::agent::AgentError;
use pvmm::error::ErrorKind;
use pvmm::exec::ExecError;
use pvmm_sandbox::{Failure, FailureKind};
use serde_json::{Map, Value, json};

/// An error of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The status of the answer.
    pub status: StatusCode,
    /// A word for programs.
    pub code: &'static str,
    /// One line for people.
    pub message: String,
    /// The seconds after which the same request may succeed.
    pub retry_after: Option<u64>,
    /// Further fields of the answer, such as the output of a command that was ended.
    pub fields: Map<String, Value>,
}

impl ApiError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let fields = Map::new();
        Self { status, code, message: message.into(), retry_after: None, fields }
    }

    /// Builds an error for a request that can never succeed; the message names the field.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    /// Builds an error for a missing or unknown token.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", message)
    }

    /// Builds an error for something that does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    /// Builds an error for a path that exists with other methods.
    pub fn method_not_allowed() -> Self {
        let message = "this path has no such method: see docs/api.json";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }

    /// Builds an error for a request that the present state does not allow.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "conflict", message)
    }

    /// Builds an error for a body or a file beyond its limit.
    pub fn too_large(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message)
    }

    /// Builds an error for a limit of the token.
    pub fn too_many(message: impl Into<String>, retry_after: u64) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "too_many", message);
        Self { retry_after: Some(retry_after), ..error }
    }

    /// Builds an error for a host that has no room now.
    pub fn unavailable(message: impl Into<String>, retry_after: u64) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message);
        Self { retry_after: Some(retry_after), ..error }
    }

    /// Builds an error for a sandbox that has just ended, or is about to answer again.
    pub fn unreachable() -> Self {
        Self::unavailable("the sandbox cannot be reached now", 1)
    }

    /// Builds an error for a part of the API that this server does not have.
    pub fn not_implemented(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "not_implemented", message)
    }

    /// Builds an error for a full disk.
    pub fn disk_full(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INSUFFICIENT_STORAGE, "disk_full", message)
    }

    /// Builds an error for a command or code that took longer than it may. Clients recognise it by
    /// the word `timeout`, which no other message of those requests may contain.
    pub fn timeout(message: impl std::fmt::Display) -> Self {
        let message = format!("{message}: timeout");
        Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message)
    }

    /// Builds an error for a guest or a part of the host that does not answer in time.
    pub fn overdue(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "overdue", message)
    }

    /// Builds an error that is a fault of the server or its host.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }

    /// Returns the error as the JSON that is sent.
    pub fn json(&self) -> Value {
        let mut fields = self.fields.clone();
        fields.insert("error".to_owned(), json!(self.message));
        fields.insert("code".to_owned(), json!(self.code));
        Value::Object(fields)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.json())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Joins the messages of an error and its causes into one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        let kind = failure.kind();
        let message = match failure.hint {
            Some(hint) => format!("{} ({hint})", failure.message),
            None => failure.message,
        };
        match kind {
            FailureKind::InvalidInput => Self::bad_request(message),
            FailureKind::NotFound => Self::not_found(message),
            FailureKind::Conflict => Self::conflict(message),
            FailureKind::NoMemory => Self::unavailable(message, 5),
            FailureKind::DiskFull => Self::disk_full(message),
            FailureKind::Timeout => Self::overdue(message),
            FailureKind::Unreachable => Self::unreachable(),
            FailureKind::Internal => Self::internal(message),
        }
    }
}

/// Maps an error number that the guest's kernel gave for a request.
fn of_errno(errno: i32, message: String) -> ApiError {
    match errno {
        libc::ENOENT | libc::ESRCH => ApiError::not_found(message),
        libc::EEXIST | libc::EBUSY | libc::ENOTEMPTY | libc::ETXTBSY => ApiError::conflict(message),
        libc::ENOSPC | libc::EDQUOT => ApiError::disk_full(message),
        libc::EFBIG => ApiError::too_large(message),
        _ => ApiError::bad_request(message),
    }
}

impl From<AgentError> for ApiError {
    fn from(error: AgentError) -> Self {
        let message = chain(&error);
        if let Some(errno) = error.errno() {
            return of_errno(errno, message);
        }
        match &error {
            AgentError::TooLarge { .. } => Self::too_large(message),
            AgentError::TooMany => Self::too_many(message, 1),
            AgentError::Dial { .. } => Self::unreachable(),
            AgentError::HoldsSecrets => Self::conflict(message),
            AgentError::Refused(_) => Self::conflict(message),
            error => of_kind(error.kind(), message),
        }
    }
}

fn of_kind(kind: ErrorKind, message: String) -> ApiError {
    match kind {
        ErrorKind::InvalidConfig => ApiError::bad_request(message),
        ErrorKind::GuestRefused => ApiError::conflict(message),
        ErrorKind::Timeout => ApiError::overdue(message),
        ErrorKind::HostResource => ApiError::unavailable(message, 5),
        _ => ApiError::internal(message),
    }
}

impl From<ExecError> for ApiError {
    fn from(error: ExecError) -> Self {
        match error {
            ExecError::Agent(error) => error.into(),
            error => of_kind(error.kind(), chain(&error)),
        }
    }
}

impl From<std::io::Error> for ApiError {
    fn from(error: std::io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => Self::disk_full("the server's disk is full"),
            _ => Self::internal(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pvmm_sandbox::guest_agent;

    use super::*;

    #[test]
    fn sandbox_that_cannot_be_reached_is_to_be_asked_again() {
        let nowhere = tempfile::tempdir().unwrap();
        let connected = guest_agent::connect_at(&nowhere.path().join("v"), Duration::ZERO);
        let error = connected.map(drop).unwrap_err();
        let by_library = ApiError::from(guest_agent::refuse(error));
        assert_eq!((by_library.status.as_u16(), by_library.retry_after), (503, Some(1)));
    }
}
