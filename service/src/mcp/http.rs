//! `/mcp`: the protocol over streamable HTTP. A session is a conversation.
//!
//! The token is checked before, like that of every other request. It also keeps web pages out,
//! which is what the protocol checks the `Host` header for.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{MethodRouter, any_service};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use tokio::sync::Semaphore;

use crate::app::App;

use super::conversation::{Conversation, Defaults};
use super::handler::Handler;

/// The time to live of a sandbox without a call, and of a session without a request.
const TTL: Duration = Duration::from_secs(3600);
/// The most sessions at a time.
const MAX_SESSIONS: usize = 256;
/// The largest request: a file of 8 MiB, escaped or as base64.
const MAX_BODY: usize = 16 << 20;
const TEMPLATE: &str = "base";

/// Returns the handlers of `/mcp`.
pub fn route(app: &Arc<App>) -> MethodRouter<Arc<App>> {
    any_service(service(app)).layer(middleware::from_fn(nothing_left))
}

/// Says of a session that was ended that nothing of it is left: some clients take `rmcp`'s
/// "accepted" for a failure.
async fn nothing_left(request: Request, next: Next) -> Response {
    let ends = request.method() == Method::DELETE;
    let mut response = next.run(request).await;
    if ends && response.status() == StatusCode::ACCEPTED {
        *response.status_mut() = StatusCode::NO_CONTENT;
    }
    response
}

fn service(app: &Arc<App>) -> StreamableHttpService<Handler, LocalSessionManager> {
    let mut sessions = LocalSessionManager::default();
    sessions.session_config.keep_alive = Some(TTL);
    let slots = Arc::new(Semaphore::new(MAX_SESSIONS));
    let shared = Arc::clone(app);
    let begin = move || {
        let slot = Arc::clone(&slots).try_acquire_owned();
        let slot = slot.map_err(|_| io::Error::other("too many sessions: end some"))?;
        let (template, cpus, memory_mib) = (TEMPLATE.to_owned(), None, None);
        let defaults = Defaults { template, cpus, memory_mib, ttl: TTL };
        Ok(Handler::of_tokens(Conversation::new(Arc::clone(&shared), defaults), slot))
    };
    let config = StreamableHttpServerConfig::default()
        .with_cancellation_token(app.stopping.clone())
        .with_max_request_body_bytes(MAX_BODY)
        .disable_allowed_hosts();
    StreamableHttpService::new(begin, Arc::new(sessions), config)
}
