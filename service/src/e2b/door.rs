//! Tells E2B's requests from others, checks who sends them, and leads them to their handlers.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use tower::ServiceExt;

use crate::app::App;
use crate::audit::Act;
use crate::credentials::owner_of;
use crate::error::ApiError;
use crate::extract::{Owner, shown, text};
use crate::preview::{E2B_PORTS, Target as Preview};
use crate::store::State as SandboxState;
use crate::{access, form, ids, proxy};

use super::error::{Refused, gone};
use super::signature::Signed;
use super::state::{Door, Target};
use super::{
    code, files, filesystem, metrics, network, process, sandboxes, snapshots, templates, watchers,
};

/// The port that the clients take for commands and files.
const ENVD_PORT: u16 = E2B_PORTS[0];
/// The port that the clients take for code.
const CODE_PORT: u16 = E2B_PORTS[1];
/// The first parts of the paths of the server that makes sandboxes.
const FIRST_PARTS: [&str; 14] = [
    "access-tokens",
    "api-keys",
    "default-templates",
    "events",
    "nodes",
    "sandboxes",
    "secrets",
    "snapshots",
    "teams",
    "templates",
    "v2",
    "v3",
    "volumecontent",
    "volumes",
];

/// The routers of E2B's API, and their state.
#[derive(Clone)]
struct Lanes {
    door: Arc<Door>,
    control: Router,
    envd: Router,
    code: Router,
}

/// Puts E2B's API before a router, which gets all other requests.
pub fn beside(app: Arc<App>, router: Router) -> Router {
    let door = Arc::new(Door::open(app));
    let lanes = Lanes {
        control: control().layer(middleware::from_fn(access::mark)).with_state(Arc::clone(&door)),
        envd: envd().layer(middleware::from_fn(access::mark)).with_state(Arc::clone(&door)),
        code: interpreter().layer(middleware::from_fn(access::mark)).with_state(Arc::clone(&door)),
        door,
    };
    router.layer(middleware::from_fn_with_state(lanes, lead))
}

fn control() -> Router<Arc<Door>> {
    Router::new()
        .route("/sandboxes", get(sandboxes::list).post(sandboxes::create))
        .route("/v2/sandboxes", get(sandboxes::list).post(sandboxes::create))
        .route("/sandboxes/metrics", get(metrics::several))
        .route("/sandboxes/{id}", get(sandboxes::get).delete(sandboxes::delete))
        .route("/sandboxes/{id}/timeout", post(sandboxes::timeout))
        .route("/sandboxes/{id}/refreshes", post(sandboxes::refresh))
        .route("/sandboxes/{id}/pause", post(sandboxes::pause))
        .route("/sandboxes/{id}/resume", post(sandboxes::connect))
        .route("/sandboxes/{id}/connect", post(sandboxes::connect))
        .route("/v2/sandboxes/{id}/connect", post(sandboxes::connect))
        .route("/sandboxes/{id}/fork", post(sandboxes::fork))
        .route("/sandboxes/{id}/metrics", get(metrics::one))
        .route("/sandboxes/{id}/network", put(network::put))
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/snapshots", get(snapshots::list))
        .route("/templates", get(templates::list))
        .route("/v2/templates", get(templates::list))
        .route("/templates/aliases/{name}", get(templates::alias))
        .route("/templates/{name}", axum::routing::delete(templates::delete))
        .fallback(absent)
        .method_not_allowed_fallback(absent)
}

fn envd() -> Router<Arc<Door>> {
    Router::new()
        .route("/health", get(sandboxes::health))
        .route("/metrics", get(metrics::of_guest))
        .route("/envs", get(sandboxes::envs))
        .route("/files", get(files::read).post(files::write))
        .route("/process.Process/List", post(process::list))
        .route("/process.Process/Start", post(process::start))
        .route("/process.Process/Connect", post(process::connect))
        .route("/process.Process/Update", post(process::update))
        .route("/process.Process/SendInput", post(process::send_input))
        .route("/process.Process/StreamInput", post(process::stream_input))
        .route("/process.Process/CloseStdin", post(process::close_stdin))
        .route("/process.Process/SendSignal", post(process::send_signal))
        .route("/filesystem.Filesystem/Stat", post(filesystem::stat))
        .route("/filesystem.Filesystem/ListDir", post(filesystem::list))
        .route("/filesystem.Filesystem/MakeDir", post(filesystem::make_dir))
        .route("/filesystem.Filesystem/Move", post(filesystem::rename))
        .route("/filesystem.Filesystem/Remove", post(filesystem::remove))
        .route("/filesystem.Filesystem/WatchDir", post(watchers::watch))
        .route("/filesystem.Filesystem/CreateWatcher", post(watchers::create))
        .route("/filesystem.Filesystem/GetWatcherEvents", post(watchers::events))
        .route("/filesystem.Filesystem/RemoveWatcher", post(watchers::remove))
        .fallback(absent)
        .method_not_allowed_fallback(absent)
}

fn interpreter() -> Router<Arc<Door>> {
    Router::new()
        .route("/health", get(sandboxes::health))
        .route("/execute", post(code::execute))
        .route("/contexts", get(code::list).post(code::create))
        .route("/contexts/{session}", axum::routing::delete(code::remove))
        .route("/contexts/{session}/restart", post(code::restart))
        .fallback(absent)
        .method_not_allowed_fallback(absent)
}

/// Answers a part of E2B's API that this server does not have.
async fn absent(uri: Uri) -> Refused {
    let path = shown(uri.path());
    Refused(ApiError::not_implemented(format!("pvmm does not have this part of E2B: {path}")))
}

/// Returns the sandbox and the port that a request to a guest names.
fn named(headers: &HeaderMap) -> Option<(&str, u16)> {
    if let Some(id) = text(headers, "e2b-sandbox-id") {
        let port = text(headers, "e2b-sandbox-port").and_then(|port| port.parse().ok());
        return Some((id, port.unwrap_or(ENVD_PORT)));
    }
    let Preview { id, port } = Preview::of(text(headers, header::HOST.as_str())?)?;
    E2B_PORTS.contains(&port).then_some((id, port))
}

fn is_control(path: &str) -> bool {
    let first = path.trim_start_matches('/').split('/').next().unwrap_or_default();
    FIRST_PARTS.contains(&first)
}

/// Returns the sandbox whose credential signed a request for a file, if one did.
fn signer(door: &Door, request: &Request) -> Result<Option<String>, ApiError> {
    let query = request.uri().query().unwrap_or_default();
    let pairs = form::urlencoded(query.as_bytes())?;
    let value = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| &value[..]);
    let Some(signature) = value("signature") else { return Ok(None) };
    let expires = value("signature_expiration").map(str::parse).transpose();
    let signed = Signed {
        path: value("path").unwrap_or_default(),
        operation: if request.method() == axum::http::Method::GET { "read" } else { "write" },
        user: value("username").unwrap_or_default(),
        expires: expires.map_err(|_| ApiError::bad_request("signature_expiration: no number"))?,
        signature,
    };
    if signed.has_expired() {
        return Err(ApiError::unauthorized("the signature has expired"));
    }
    let ids = door.app.list().into_iter().map(|entry| entry.row().id);
    let found = ids.into_iter().find(|id| signed.is_of(&door.app.key.token(id)));
    found.map(Some).ok_or_else(|| ApiError::unauthorized("the signature fits no sandbox"))
}

/// Leads a request to its router.
async fn lead(State(lanes): State<Lanes>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if let Some((id, port)) = named(request.headers()) {
        let id = id.to_owned();
        return into_guest(lanes, id, port, request).await;
    }
    if path == "/files" && request.headers().get(header::AUTHORIZATION).is_none() {
        return match signer(&lanes.door, &request) {
            Ok(Some(id)) => to_sandbox(&lanes.door, &id, lanes.envd, request).await,
            Ok(None) => next.run(request).await,
            Err(error) => refuse(&lanes.door, &request, error),
        };
    }
    if !is_control(path) {
        return next.run(request).await;
    }
    match owner_of(&lanes.door.app, request.headers()) {
        Some(owner) => call(lanes.control, request, Owner(owner)).await,
        None => {
            let message = "send a valid token of this server as E2B_API_KEY";
            refuse(&lanes.door, &request, ApiError::unauthorized(message))
        }
    }
}

fn refuse(door: &Door, request: &Request, error: ApiError) -> Response {
    let act = Act::new("refuse", "", "").what(request.uri().path());
    door.app.audit.write(&act.outcome(&Err::<(), _>(error.clone())));
    Refused(error).into_response()
}

/// Checks that a request may go to a sandbox: by the sandbox's credential, by a token of the server
/// or by a signature.
fn permit(door: &Door, id: &str, port: u16, request: &Request) -> Result<(), ApiError> {
    let (key, headers) = (&door.app.key, request.headers());
    let has_token = text(headers, "x-access-token").is_some_and(|token| key.is_token(id, token));
    let for_port = || {
        let token = text(headers, "e2b-traffic-access-token").unwrap_or_default();
        // The clients send nothing else with requests about contexts. Code needs the other token.
        let opens = match port {
            ENVD_PORT => false,
            CODE_PORT => request.uri().path().starts_with("/contexts"),
            _ => true,
        };
        opens && key.opens_port(id, port, token)
    };
    if has_token || for_port() || owner_of(&door.app, headers).is_some() {
        return Ok(());
    }
    if request.uri().path() == "/files" && signer(door, request)?.is_some_and(|it| it == id) {
        return Ok(());
    }
    Err(ApiError::unauthorized("send the sandbox's access token"))
}

/// Passes a request on to a sandbox, if it may.
async fn into_guest(lanes: Lanes, id: String, port: u16, request: Request) -> Response {
    if !ids::is_id(&id) || lanes.door.app.find(&id).is_err() {
        return gone();
    }
    if let Err(error) = permit(&lanes.door, &id, port, &request) {
        return refuse(&lanes.door, &request, error);
    }
    match port {
        ENVD_PORT => to_sandbox(&lanes.door, &id, lanes.envd, request).await,
        CODE_PORT => to_sandbox(&lanes.door, &id, lanes.code, request).await,
        port => {
            let path = request.uri().path_and_query().map_or("/", |path| path.as_str()).to_owned();
            let answer = proxy::forward(&lanes.door.app, &id, port, &path, request).await;
            answer.unwrap_or_else(|error| Refused(error).into_response())
        }
    }
}

/// Gives a request to the handlers of a sandbox.
async fn to_sandbox(door: &Door, id: &str, lane: Router, mut request: Request) -> Response {
    let Ok(entry) = door.app.find(id) else { return gone() };
    let row = entry.row();
    if row.state == SandboxState::Failed {
        return gone();
    }
    request.extensions_mut().insert(Target(row.id));
    call(lane, request, Owner(row.owner)).await
}

async fn call(lane: Router, mut request: Request, owner: Owner) -> Response {
    request.extensions_mut().insert(owner);
    match lane.oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn request_to_a_sandbox_is_known_by_headers_or_host() {
        let id = ids::new_id().unwrap();
        let by_header = headers(&[("e2b-sandbox-id", &id), ("e2b-sandbox-port", "49999")]);
        assert_eq!(named(&by_header), Some((&id[..], CODE_PORT)));
        assert_eq!(named(&headers(&[("e2b-sandbox-id", &id)])), Some((&id[..], ENVD_PORT)));
        let host = format!("49983-{id}.example.com");
        assert_eq!(named(&headers(&[("host", &host)])), Some((&id[..], ENVD_PORT)));
        let preview = format!("8000-{id}.example.com");
        assert_eq!(named(&headers(&[("host", &preview)])), None);
        assert_eq!(named(&headers(&[("host", "localhost:8088")])), None);
    }

    #[test]
    fn paths_of_other_apis_are_left_alone() {
        for path in ["/sandboxes", "/v2/sandboxes/x/connect", "/templates/aliases/a"] {
            assert!(is_control(path), "{path}");
        }
        for path in ["/v1/sandboxes", "/healthz", "/", "/mcp", "/sandboxesx"] {
            assert!(!is_control(path), "{path}");
        }
    }
}
