//! Parts of the API that this server does not have, and paths that nobody has.

use axum::http::Uri;

use crate::error::ApiError;
use crate::extract::{Owner, shown};

/// The paths that are answered with 501, with everything below them.
pub const PREFIXES: [&str; 6] = [
    "/v1/databases",
    "/v1/apps",
    "/v1/functions",
    "/v1/schedules",
    "/v1/preview-repos",
    "/v1/repos",
];

/// Answers a path that has no handler, after the token was checked.
pub async fn absent(_: Owner, uri: Uri) -> ApiError {
    let path = uri.path();
    let below = |prefix: &&&str| {
        path.strip_prefix(**prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    match PREFIXES.iter().find(below) {
        Some(prefix) => {
            let what = prefix.trim_start_matches("/v1/");
            ApiError::not_implemented(format!("pvmm runs sandboxes; {what} are not part of it"))
        }
        None => ApiError::not_found(format!("no such path: '{}'", shown(path))),
    }
}

/// Answers a path that exists with other methods.
pub async fn other_method() -> ApiError {
    ApiError::method_not_allowed()
}
