//! The paths of the API and their handlers.
//!
//! The list of paths is compared with `docs/api.json` by a test, both ways.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::handler::Handler;
use axum::http::{Method, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any, delete, get, patch, post, put};

use crate::access;
use crate::app::App;
use crate::audit::Act;
use crate::e2b;
use crate::error::ApiError;
use crate::extract::Owner;
use crate::mcp;
use crate::page;
use crate::preview;
use crate::resources::{
    absent, builds, checkpoints, code, egress, exec, files, forks, hibernation, lifecycle, logs,
    me, metrics, overview, pause, pool, ports, sandboxes, snapshots, ssh, templates, volumes,
};

const HEALTH: &str = "/healthz";

/// The paths, with the methods that each has.
struct Table {
    router: Router<Arc<App>>,
    #[cfg_attr(not(test), allow(dead_code))]
    list: Vec<(Method, &'static str)>,
}

impl Table {
    fn on(mut self, method: Method, path: &'static str, handler: MethodRouter<Arc<App>>) -> Self {
        self.list.push((method, path));
        Self { router: self.router.route(path, handler), ..self }
    }

    fn get<T: 'static>(self, path: &'static str, handler: impl Handler<T, Arc<App>>) -> Self {
        self.on(Method::GET, path, get(handler))
    }

    fn post<T: 'static>(self, path: &'static str, handler: impl Handler<T, Arc<App>>) -> Self {
        self.on(Method::POST, path, post(handler))
    }

    fn put<T: 'static>(self, path: &'static str, handler: impl Handler<T, Arc<App>>) -> Self {
        self.on(Method::PUT, path, put(handler))
    }

    fn patch<T: 'static>(self, path: &'static str, handler: impl Handler<T, Arc<App>>) -> Self {
        self.on(Method::PATCH, path, patch(handler))
    }

    fn delete<T: 'static>(self, path: &'static str, handler: impl Handler<T, Arc<App>>) -> Self {
        self.on(Method::DELETE, path, delete(handler))
    }
}

fn table() -> Table {
    const ONE: &str = "/v1/sandboxes/{id}";
    const SESSION: &str = "/v1/sandboxes/{id}/repl/sessions/{session}";
    Table { router: Router::new(), list: Vec::new() }
        .get(HEALTH, pool::healthz)
        .get("/v1/sandboxes", sandboxes::list)
        .post("/v1/sandboxes", sandboxes::create)
        .get(ONE, sandboxes::get)
        .delete(ONE, sandboxes::delete)
        .post("/v1/sandboxes/{id}/exec", exec::exec)
        .post("/v1/sandboxes/{id}/exec/stream", exec::exec_stream)
        .get("/v1/sandboxes/{id}/ssh", ssh::ssh)
        .get("/v1/sandboxes/{id}/repl/sessions", code::list)
        .post("/v1/sandboxes/{id}/repl/sessions", code::open)
        .delete(SESSION, code::close)
        .post("/v1/sandboxes/{id}/repl/sessions/{session}/run", code::run)
        .get("/v1/sandboxes/{id}/fs", files::read)
        .put("/v1/sandboxes/{id}/fs", files::write)
        .delete("/v1/sandboxes/{id}/fs", files::remove)
        .get("/v1/sandboxes/{id}/fs/dir", files::list)
        .get("/v1/sandboxes/{id}/fs/stat", files::stat)
        .post("/v1/sandboxes/{id}/fs/mkdir", files::mkdir)
        .post("/v1/sandboxes/{id}/fs/move", files::rename)
        .get("/v1/sandboxes/{id}/logs", logs::logs)
        .post("/v1/sandboxes/{id}/pause", pause::pause)
        .post("/v1/sandboxes/{id}/resume", pause::resume)
        .post("/v1/sandboxes/{id}/fork", forks::fork)
        .post("/v1/sandboxes/{id}/fork-tree", forks::fork_tree)
        .post("/v1/sandboxes/{id}/promote", forks::promote)
        .post("/v1/sandboxes/{id}/hibernate", hibernation::hibernate)
        .post("/v1/sandboxes/{id}/wake", hibernation::wake)
        .post("/v1/sandboxes/{id}/checkpoint", checkpoints::checkpoint)
        .get("/v1/sandboxes/{id}/checkpoints", checkpoints::list)
        .delete("/v1/sandboxes/{id}/checkpoints/{name}", checkpoints::delete)
        .post("/v1/sandboxes/{id}/checkout", checkpoints::checkout)
        .post("/v1/sandboxes/{id}/rollback", checkpoints::rollback)
        .get("/v1/sandboxes/{id}/diff", checkpoints::diff)
        .get("/v1/sandboxes/{id}/lifecycle", lifecycle::get)
        .patch("/v1/sandboxes/{id}/lifecycle", lifecycle::patch)
        .get("/v1/sandboxes/{id}/ports", ports::list)
        .get("/v1/sandboxes/{id}/ports/{port}", ports::get)
        .put("/v1/sandboxes/{id}/ports/{port}", ports::put)
        .get("/v1/sandboxes/{id}/egress", egress::get)
        .put("/v1/sandboxes/{id}/egress", egress::put)
        .post("/v1/sandboxes/{id}/snapshots", snapshots::create)
        .get("/v1/snapshots", snapshots::list)
        .get("/v1/snapshots/{id}", snapshots::get)
        .delete("/v1/snapshots/{id}", snapshots::delete)
        .get("/v1/templates", templates::list)
        .post("/v1/templates/build", builds::build)
        .get("/v1/templates/builds", builds::list)
        .get("/v1/templates/builds/{id}", builds::get)
        .get("/v1/templates/builds/{id}/logs", builds::logs)
        .get("/v1/templates/{name}", templates::get)
        .delete("/v1/templates/{name}", templates::delete)
        .get("/v1/volumes", volumes::list)
        .post("/v1/volumes", volumes::create)
        .get("/v1/volumes/{name}", volumes::get)
        .delete("/v1/volumes/{name}", volumes::delete)
        .get("/v1/me", me::me)
        .get("/v1/me/tokens", me::tokens)
        .post("/v1/me/tokens", me::create_token)
        .delete("/v1/me/tokens/{prefix}", me::revoke_token)
        .get("/v1/pool", pool::pool)
        .get("/v1/overview", overview::overview)
        .get("/metrics", metrics::metrics)
}

/// Builds the router of the whole API.
pub fn router(app: Arc<App>) -> Router {
    let mcp = mcp::route(&app);
    let router = table()
        .router
        .route("/v1/sandboxes/{id}/ports/{port}/proxy/", any(ports::forward))
        .route("/v1/sandboxes/{id}/ports/{port}/proxy/{*path}", any(ports::forward))
        .route("/mcp", mcp)
        .merge(page::routes())
        .fallback(absent::absent)
        .method_not_allowed_fallback(absent::other_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&app), authenticate))
        .with_state(Arc::clone(&app));
    let router = e2b::beside(Arc::clone(&app), router);
    // Guests may have the paths of every API.
    let router = router.layer(middleware::from_fn_with_state(Arc::clone(&app), preview::lead));
    router.layer(middleware::from_fn_with_state(app, access::note))
}

/// Returns the token of a request.
fn bearer(request: &Request) -> Option<&str> {
    let value = request.headers().get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

/// Refuses a request without a token that is accepted.
async fn authenticate(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if path == HEALTH || page::is_part(path) {
        return next.run(request).await;
    }
    let Some(owner) = bearer(&request).and_then(|token| app.tokens.check(token)) else {
        let error = ApiError::unauthorized("send a valid token: Authorization: Bearer TOKEN");
        let act = Act::new("refuse", "", "").what(request.uri().path());
        app.audit.write(&act.outcome(&Err::<(), _>(error.clone())));
        return error.into_response();
    };
    request.extensions_mut().insert(Owner(owner));
    next.run(request).await
}

#[cfg(test)]
mod tests;
