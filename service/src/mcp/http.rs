//! `/mcp`: the protocol over streamable HTTP. A session is a conversation.
//!
//! The token is checked before, like that of every other request. It also keeps web pages out,
//! which is what the protocol checks the `Host` header for. The query of the address says what the
//! conversation's sandboxes are made from: clients send it with each request.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any};
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde::Deserialize;
use tokio::sync::Semaphore;

use crate::app::App;
use crate::error::ApiError;
use crate::extract::{Queried, shown};
use crate::ids;

use super::conversation::{Conversation, Defaults};
use super::handler::Handler;

/// The time to live of a sandbox without a call, and of a session without a request.
const TTL: Duration = Duration::from_secs(3600);
/// The longest of both times, for a client that asks for more.
const LONG_TTL: Duration = Duration::from_secs(24 * 3600);
/// The most sessions at a time.
const MAX_SESSIONS: usize = 256;
/// The largest request: a file of 8 MiB, escaped or as base64.
const MAX_BODY: usize = 16 << 20;
const TEMPLATE: &str = "base";

type Service = StreamableHttpService<Handler, LocalSessionManager>;

/// The query of the address.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wishes {
    template: Option<String>,
    ttl_seconds: Option<u64>,
}

impl Wishes {
    fn defaults(self) -> Result<Defaults, ApiError> {
        let template = self.template.unwrap_or_else(|| TEMPLATE.to_owned());
        if !ids::is_name(&template) {
            let message = format!("template: '{}' is not the name of one", shown(&template));
            return Err(ApiError::bad_request(message));
        }
        let ttl = self.ttl_seconds.map_or(TTL, Duration::from_secs);
        if ttl.is_zero() || ttl > LONG_TTL {
            let message = format!("ttl_seconds: use a number from 1 to {}", LONG_TTL.as_secs());
            return Err(ApiError::bad_request(message));
        }
        Ok(Defaults { template, cpus: None, memory_mib: None, ttl })
    }
}

/// Returns the handlers of `/mcp`.
pub fn route(app: &Arc<App>) -> MethodRouter<Arc<App>> {
    let slots = Arc::new(Semaphore::new(MAX_SESSIONS));
    let [short, long] = [TTL, LONG_TTL].map(|idle| service(app, idle, &slots));
    any(async move |Queried(wishes): Queried<Wishes>, mut request: Request| {
        let defaults = wishes.defaults()?;
        let service = if defaults.ttl > TTL { long } else { short };
        request.extensions_mut().insert(defaults);
        Ok::<_, ApiError>(answer(service, request).await)
    })
}

/// Answers a request. Says of a session that was ended that nothing of it is left: some clients
/// take `rmcp`'s "accepted" for a failure.
async fn answer(service: Service, request: Request) -> Response {
    let ends = request.method() == Method::DELETE;
    let mut response = service.handle(request).await.map(Body::new).into_response();
    if ends && response.status() == StatusCode::ACCEPTED {
        *response.status_mut() = StatusCode::NO_CONTENT;
    }
    response
}

/// Makes a service whose sessions end after `idle` without a request.
fn service(app: &Arc<App>, idle: Duration, slots: &Arc<Semaphore>) -> Service {
    let mut sessions = LocalSessionManager::default();
    sessions.session_config.keep_alive = Some(idle);
    let (shared, slots) = (Arc::clone(app), Arc::clone(slots));
    let begin = move || {
        let slot = Arc::clone(&slots).try_acquire_owned();
        let slot = slot.map_err(|_| io::Error::other("too many sessions: end some"))?;
        // Each request brings the defaults of its address.
        let defaults = Wishes::default().defaults().map_err(|e| io::Error::other(e.message))?;
        Ok(Handler::of_tokens(Conversation::new(Arc::clone(&shared), defaults), slot))
    };
    let config = StreamableHttpServerConfig::default()
        .with_cancellation_token(app.stopping.clone())
        .with_max_request_body_bytes(MAX_BODY)
        .disable_allowed_hosts();
    StreamableHttpService::new(begin, Arc::new(sessions), config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_says_what_sandboxes_are_made_from() {
        let of = |template: Option<&str>, ttl_seconds| {
            Wishes { template: template.map(str::to_owned), ttl_seconds }.defaults()
        };
        let plain = of(None, None).unwrap();
        assert_eq!((&plain.template[..], plain.ttl), ("base", TTL));
        let other = of(Some("agent"), Some(7200)).unwrap();
        assert_eq!((&other.template[..], other.ttl), ("agent", 2 * TTL));
        for (template, ttl) in [(Some("../x"), None), (None, Some(0)), (None, Some(u64::MAX))] {
            assert_eq!(of(template, ttl).unwrap_err().status, 400);
        }
    }
}
