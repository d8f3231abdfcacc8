//! Counts each answer by its status and, if asked for, logs and traces each request once.
//!
//! A line has the path as the router knows it, with `{id}` in place of values. Bodies, queries,
//! headers and tokens are never in it.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header;
use axum::middleware::Next;
use axum::response::Response;
use serde::Serialize;

use crate::app::App;
use crate::ids;
use crate::preview::Target;
use crate::traces::{Answered, Context};

/// The path of a request as a router within this one knows it.
#[derive(Clone)]
struct Template(MatchedPath);

/// A request in the log.
#[derive(Serialize)]
struct Line<'a> {
    method: &'a str,
    path: &'a str,
    status: u16,
    /// The time until the answer began.
    duration_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<&'a str>,
}

/// Notes the path that a router within this one has found, for [`note`].
pub async fn mark(path: Option<MatchedPath>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if let Some(path) = path {
        response.extensions_mut().insert(Template(path));
    }
    response
}

/// Returns the sandbox that a request is about: in its path, its host name or E2B's header.
fn sandbox(request: &Request) -> Option<String> {
    let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    let in_host = header(header::HOST.as_str()).and_then(Target::of).map(|it| it.id);
    let in_path = request.uri().path().split('/').find(|part| ids::is_id(part));
    let named = in_host.or(header("e2b-sandbox-id")).or(in_path);
    named.filter(|id| ids::is_id(id)).map(str::to_owned)
}

/// Counts an answer, and logs its request.
pub async fn note(
    State(app): State<Arc<App>>,
    path: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response {
    let begun = Instant::now();
    let method = request.method().clone();
    let (log, traces) = (app.options.json_log.as_ref(), app.metrics.traces.as_ref());
    let sandbox = if log.is_some() || traces.is_some() { sandbox(&request) } else { None };
    let traceparent = request.headers().get("traceparent").and_then(|text| text.to_str().ok());
    let context = traces.and_then(|_| Context::of_request(traceparent));
    let response = match context.clone() {
        Some(context) => context.scope(next.run(request)).await,
        None => next.run(request).await,
    };
    let (status, took) = (response.status().as_u16(), begun.elapsed());
    app.metrics.count_response(status);
    let inner = response.extensions().get::<Template>().map(|inner| inner.0.as_str());
    let (method, sandbox) = (method.as_str(), sandbox.as_deref());
    let route = inner.or(path.as_ref().map(MatchedPath::as_str)).unwrap_or("other");
    if let (Some(traces), Some(context)) = (traces, &context) {
        traces.request(context, &Answered { method, route, status, sandbox, took });
    }
    if let Some(log) = log {
        let line = Line {
            method,
            path: route,
            status,
            duration_ms: took.as_millis() as u64,
            sandbox,
            trace: context.as_ref().map(Context::trace),
        };
        log.write("INFO", "request", "answered", &line);
    }
    response
}
