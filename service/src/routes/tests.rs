//! Tests of the router: tokens, bodies, errors, and the agreement with `docs/api.json`.

use std::collections::BTreeSet;
use std::path::Path;

use axum::body::Body;
use axum::http::StatusCode;
use pvmm_sandbox::Sandboxes;
use serde_json::Value;
use tower::ServiceExt;

use super::*;
use crate::audit::Audit;
use crate::ids::Instance;
use crate::options::{Limits, ServeOptions};
use crate::store::{SandboxRow, State as RowState, Store};

const ID: &str = "0b0e7c0e-5d5c-4f8f-9a55-6c1d6a4b2f10";

fn app(dir: &Path) -> Arc<App> {
    let options = ServeOptions {
        listen: Vec::new(),
        token: None,
        tls: None,
        data_dir: dir.to_owned(),
        own_dir_if_taken: false,
        limits: Limits::default(),
        cpu: pvmm::CpuBaseline::Host,
        default_egress: Vec::new(),
        shells: 0,
        with_parent: false,
        json_log: None,
        traces: None,
        print_address: false,
    };
    let store = Store::open(&dir.join("db")).unwrap();
    let audit = Audit::open(&dir.join("audit.log")).unwrap();
    let sandboxes = Sandboxes::open().unwrap();
    let app = App::new(options, sandboxes, store, Instance::new().unwrap(), audit).unwrap();
    app.tokens.accept("secret", "");
    Arc::new(app)
}

struct Answer {
    status: StatusCode,
    headers: axum::http::HeaderMap,
    body: Value,
}

async fn ask(app: &Arc<App>, method: &str, path: &str, token: &str, body: &str) -> Answer {
    let bearer = format!("Bearer {token}");
    ask_with(app, (method, path), &[("authorization", &bearer)], body).await
}

#[tokio::test]
async fn request_without_a_valid_token_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    for token in ["", "wrong", "secret2"] {
        for path in ["/v1/me", "/v1/nope", "/v1/databases", "/metrics", "/page/x"] {
            let answer = ask(&app, "GET", path, token, "").await;
            assert_eq!(answer.status, 401, "{path}");
            assert!(answer.headers.contains_key("www-authenticate"));
            assert!(answer.body["error"].is_string());
        }
    }
    assert_eq!(ask(&app, "GET", "/healthz", "", "").await.status, 200);
    assert_eq!(ask(&app, "GET", "/v1/me", "secret", "").await.status, 200);
    let log = std::fs::read_to_string(dir.path().join("audit.log")).unwrap();
    assert!(log.contains("\"refuse\"") && !log.contains("secret"), "{log}");
}

#[tokio::test]
async fn unknown_and_absent_paths_are_json_errors() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let one = format!("/v1/sandboxes/{ID}");
    for (method, path, status) in [
        ("GET", "/v1/nope", 404),
        ("GET", "/page/nope", 404),
        ("PUT", "/v1/me", 405),
        ("GET", "/v1/databases", 501),
        ("POST", "/v1/apps/x/deploys", 501),
        ("GET", "/v1/appstore", 404),
        ("POST", "/v1/templates/build", 400),
        ("GET", "/v1/sandboxes/..%2f..", 404),
        ("GET", "/v1/sandboxes/%ff", 400),
        ("GET", &one[..], 404),
        ("DELETE", &one[..], 404),
        ("GET", "/v1/snapshots/x", 404),
        ("GET", "/v1/templates/builds/x", 404),
        ("GET", &format!("/v1/templates/builds/{ID}/logs"), 404),
        ("DELETE", "/v1/me/tokens/x", 404),
        ("GET", &format!("{one}/fs"), 400),
        ("GET", &format!("{one}/fs?path=/x"), 404),
        ("GET", &format!("{one}/ports/0/proxy/"), 400),
        ("GET", &format!("{one}/ssh?rows=x"), 400),
        ("GET", &format!("{one}/ssh"), 404),
    ] {
        let answer = ask(&app, method, path, "secret", "").await;
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.body);
        assert!(answer.body["error"].is_string() && answer.body["code"].is_string(), "{path}");
    }
}

#[tokio::test]
async fn bad_body_is_refused_and_never_a_server_error() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let one = |rest: &str| format!("/v1/sandboxes/{ID}/{rest}");
    let long = format!("{{\"cmd\":\"{}\"}}", "x".repeat(crate::extract::MAX_JSON));
    for (path, body, status) in [
        ("/v1/sandboxes".to_owned(), "{", 400),
        ("/v1/sandboxes".to_owned(), "[]", 400),
        ("/v1/sandboxes".to_owned(), "{\"cpu\":-1}", 400),
        ("/v1/sandboxes".to_owned(), "{\"metadata\":{\"a\":1}}", 400),
        ("/v1/sandboxes".to_owned(), "{\"from_snapshot\":\"x\"}", 404),
        ("/v1/volumes".to_owned(), "", 400),
        ("/v1/volumes".to_owned(), "{\"name\":\"a\",\"size_mb\":0}", 400),
        ("/v1/me/tokens".to_owned(), "{\"expires_in_days\":-1}", 400),
        ("/v1/me/tokens".to_owned(), " [null, null]", 400),
        (one("exec"), "", 400),
        (one("exec"), "{\"cmd\":1}", 400),
        (one("exec"), "{\"cmd\":\"x\",\"timeout_seconds\":-1}", 400),
        (one("exec"), &long, 413),
        (one("exec"), "{\"cmd\":\"x\"}", 404),
        (one("fork-tree"), "{\"count\":17}", 400),
        (one("fork-tree"), "{\"count\":-1}", 400),
        (one("repl/sessions"), "{\"language\":\"cobol\"}", 400),
        (one("pause"), "", 404),
    ] {
        let answer = ask(&app, "POST", &path, "secret", body).await;
        assert_eq!(answer.status, status, "{path} {}: {}", body.len(), answer.body);
        assert!(answer.body["error"].is_string());
    }
}

#[tokio::test]
async fn hibernated_sandbox_is_shown_without_waking() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let state = RowState::Hibernated;
    let row = SandboxRow { id: ID.to_owned(), state, persistent: true, ..SandboxRow::default() };
    app.store.put_sandboxes(&[&row]).unwrap();
    app.add(row, None);
    let one = format!("/v1/sandboxes/{ID}");
    let shown = ask(&app, "GET", &one, "secret", "").await;
    assert_eq!((shown.status, &shown.body["status"]), (StatusCode::OK, &"hibernated".into()));
    let list = ask(&app, "GET", "/v1/sandboxes", "secret", "").await;
    assert_eq!(list.body.as_array().unwrap().len(), 1);
    let times = ask(&app, "GET", &format!("{one}/lifecycle"), "secret", "").await;
    assert_eq!(times.body["persistent"], true);
    let body = "{\"ttl_seconds\":60}";
    let times = ask(&app, "PATCH", &format!("{one}/lifecycle"), "secret", body).await;
    assert_eq!((times.status, &times.body["ttl_seconds"]), (StatusCode::OK, &60.into()));
    let asleep = ask(&app, "POST", &format!("{one}/hibernate"), "secret", "").await;
    assert_eq!(asleep.status, 200);
    // Its folder is gone, so that it cannot wake, and the client learns why.
    let woken = ask(&app, "POST", &format!("{one}/exec"), "secret", "{\"cmd\":\"true\"}").await;
    assert!(woken.status.is_server_error(), "{}", woken.body);
    assert!(!woken.body["error"].as_str().unwrap().contains("timeout"));
    assert_eq!(ask(&app, "DELETE", &one, "secret", "").await.status, 204);
    assert_eq!(ask(&app, "DELETE", &one, "secret", "").await.status, 204);
    assert_eq!(ask(&app, "GET", &one, "secret", "").await.status, 404);
    assert_eq!(app.store.sandboxes().unwrap(), vec![]);
}

#[tokio::test]
async fn page_needs_no_token_and_allows_only_its_own_scripts() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    for path in ["/", "/page/page.js", "/page/page.css", "/page/icon.svg"] {
        let answer = ask(&app, "GET", path, "", "").await;
        assert_eq!(answer.status, 200, "{path}");
        let policy = answer.headers["content-security-policy"].to_str().unwrap();
        assert!(policy.starts_with("default-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
    }
    let log = std::fs::read_to_string(dir.path().join("audit.log")).unwrap();
    assert_eq!(log, "", "a look at the page is no refusal");
}

#[tokio::test]
async fn answers_and_sandboxes_are_in_metrics_and_overview() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let row = |id: &str, parent: Option<&str>| SandboxRow {
        id: id.to_owned(),
        state: RowState::Hibernated,
        parent: parent.map(str::to_owned),
        ..SandboxRow::default()
    };
    app.add(row(ID, None), None);
    app.add(row("child", Some(ID)), None);
    assert_eq!(ask(&app, "GET", "/v1/nope", "secret", "").await.status, 404);
    let overview = ask(&app, "GET", "/v1/overview", "secret", "").await.body;
    let of = |id: &str| {
        let all = overview["sandboxes"].as_array().unwrap();
        all.iter().find(|it| it["id"] == id).unwrap().clone()
    };
    assert_eq!((&of("child")["parent"], &of(ID)["memory_private"]), (&ID.into(), &Value::Null));
    let request = Request::get("/metrics").header("authorization", "Bearer secret");
    let answer = router(Arc::clone(&app)).oneshot(request.body(Body::empty()).unwrap());
    let text = crate::extract::collect(answer.await.unwrap().into_body(), 1 << 20).await.unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap();
    for line in [
        "pvmm_sandboxes{state=\"hibernated\"} 2",
        "pvmm_sandboxes_forked 1",
        "pvmm_responses_total{status=\"404\"} 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line}\n{text}");
    }
}

#[tokio::test]
async fn token_is_shown_once_and_can_be_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let made = ask(&app, "POST", "/v1/me/tokens", "secret", "{\"label\":\"ci\"}").await;
    assert_eq!(made.status, 201);
    let (token, prefix) = (made.body["token"].as_str().unwrap(), &made.body["prefix"]);
    assert_eq!(ask(&app, "GET", "/v1/me", token, "").await.status, 200);
    let list = ask(&app, "GET", "/v1/me/tokens", token, "").await;
    assert!(!list.body.to_string().contains(token));
    let path = format!("/v1/me/tokens/{}", prefix.as_str().unwrap());
    assert_eq!(ask(&app, "DELETE", &path, "secret", "").await.status, 204);
    assert_eq!(ask(&app, "GET", "/v1/me", token, "").await.status, 401);
    let log = std::fs::read_to_string(dir.path().join("audit.log")).unwrap();
    assert!(!log.contains(token));
}

fn documented() -> BTreeSet<String> {
    let api: Value = serde_json::from_str(include_str!("../../../docs/api.json")).unwrap();
    assert!(api["openapi"].as_str().unwrap().starts_with("3.1"));
    let methods = ["get", "post", "put", "patch", "delete"];
    let mut lines = BTreeSet::new();
    for (path, item) in api["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys().filter(|key| methods.contains(&&key[..])) {
            lines.insert(format!("{} {path}", method.to_uppercase()));
        }
    }
    lines
}

#[test]
fn routes_and_api_file_agree() {
    let routes: BTreeSet<_> =
        table().list.iter().map(|(method, path)| format!("{method} {path}")).collect();
    let documented = documented();
    let missing: Vec<_> = routes.difference(&documented).collect();
    let unknown: Vec<_> = documented.difference(&routes).collect();
    assert!(missing.is_empty(), "not in docs/api.json: {missing:#?}");
    assert!(unknown.is_empty(), "only in docs/api.json: {unknown:#?}");
}

/// Asks as E2B's clients do, with these headers.
async fn ask_with(
    app: &Arc<App>,
    line: (&str, &str),
    headers: &[(&str, &str)],
    body: &str,
) -> Answer {
    let mut request = Request::builder().method(line.0).uri(line.1);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::from(body.to_owned())).unwrap();
    let answer = router(Arc::clone(app)).oneshot(request).await.unwrap();
    let (parts, body) = answer.into_parts();
    let bytes = crate::extract::collect(body, 1 << 20).await.unwrap();
    let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    Answer { status: parts.status, headers: parts.headers, body }
}

#[tokio::test]
async fn e2b_request_is_answered_in_its_own_form() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let one = format!("/sandboxes/{ID}");
    let key = [("x-api-key", "secret")];
    for (line, headers, body, status) in [
        (("GET", "/v2/sandboxes"), &[("x-api-key", "wrong")][..], "", 401),
        (("GET", "/v2/sandboxes"), &[], "", 401),
        (("GET", &one[..]), &key, "", 404),
        (("GET", "/sandboxes/../x"), &key, "", 501),
        (("GET", "/sandboxes/x"), &key, "", 404),
        (("POST", "/v2/sandboxes"), &key, "{", 400),
        (("POST", "/v2/sandboxes"), &key, r#"{"templateID":"../x"}"#, 400),
        (("POST", "/v2/sandboxes"), &key, r#"{"templateID":"base","iam":{}}"#, 501),
        (("POST", &format!("{one}/fork")), &key, r#"{"count":1000}"#, 400),
        (("POST", &format!("{one}/pause")), &key, "", 404),
        (("GET", "/sandboxes?limit=x"), &key, "", 400),
        (("POST", "/v3/templates"), &key, "{}", 501),
        (("GET", "/volumes"), &key, "", 501),
        (("GET", "/health"), &[("e2b-sandbox-id", ID)], "", 502),
        (("POST", "/process.Process/List"), &[("e2b-sandbox-id", "../x")], "{}", 502),
        (("GET", "/files?path=/x&signature=v1_x"), &[], "", 401),
        (("GET", "/files?path=/x&signature=v1_x&signature_expiration=1"), &[], "", 401),
    ] {
        let answer = ask_with(&app, line, headers, body).await;
        assert_eq!(answer.status, status, "{line:?}: {}", answer.body);
        assert_eq!(answer.body["code"], status, "{line:?}");
        assert!(answer.body["message"].is_string(), "{line:?}");
    }
    let list = ask_with(&app, ("GET", "/v2/sandboxes"), &key, "").await;
    assert_eq!((list.status, list.body), (StatusCode::OK, serde_json::json!([])));
}

#[tokio::test]
async fn e2b_request_to_a_sandbox_needs_a_credential() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let row =
        SandboxRow { id: ID.to_owned(), state: RowState::Hibernated, ..SandboxRow::default() };
    app.add(row, None);
    let to = ("e2b-sandbox-id", ID);
    for headers in [&[to][..], &[to, ("x-access-token", "wrong")], &[to, ("x-api-key", "wrong")]] {
        let answer = ask_with(&app, ("GET", "/health"), headers, "").await;
        assert_eq!(answer.status, 401, "{headers:?}");
    }
    let path = format!("/sandboxes/{ID}");
    let info = ask_with(&app, ("GET", &path), &[("x-api-key", "secret")], "").await;
    let token = info.body["envdAccessToken"].as_str().unwrap().to_owned();
    let headers = [to, ("x-access-token", &token[..])];
    let call = |path| ask_with(&app, ("POST", path), &headers, "{");
    // The sandbox is paused, and a look does not wake it.
    assert_eq!(ask_with(&app, ("GET", "/health"), &headers, "").await.status, 502);
    assert_eq!(call("/filesystem.Filesystem/Stat").await.body["code"], "invalid_argument");
    assert_eq!(call("/nope").await.status, 501);
    let traffic = app.key.traffic_token(ID);
    let code = ("e2b-sandbox-port", "49999");
    let headers = [to, code, ("e2b-traffic-access-token", &traffic[..])];
    assert_eq!(ask_with(&app, ("POST", "/contexts"), &headers, "{").await.status, 400);
    assert_eq!(ask_with(&app, ("POST", "/execute"), &headers, "{").await.status, 401);
    let headers = [to, ("e2b-traffic-access-token", &traffic[..])];
    assert_eq!(ask_with(&app, ("GET", "/files?path=/x"), &headers, "").await.status, 401);
    let start = call("/process.Process/Start").await;
    assert_eq!((start.status, start.body), (StatusCode::OK, Value::Null));
}

/// Adds a sandbox whose state is lost, so that a request that may go to it gets a 5xx.
fn with_lost_sandbox(dir: &Path) -> Arc<App> {
    let app = app(dir);
    let row =
        SandboxRow { id: ID.to_owned(), state: RowState::Hibernated, ..SandboxRow::default() };
    app.store.put_sandboxes(&[&row]).unwrap();
    app.add(row, None);
    app
}

#[tokio::test]
async fn preview_needs_the_token_of_its_port() {
    let dir = tempfile::tempdir().unwrap();
    let app = with_lost_sandbox(dir.path());
    let path = format!("/v1/sandboxes/{ID}/ports/8000");
    let bearer = ("authorization", "Bearer secret");
    let local = [bearer, ("host", "127.0.0.1:8088")];
    let shown = ask_with(&app, ("GET", &path), &local, "").await.body;
    let (url, token) = (shown["url"].as_str().unwrap(), shown["token"].as_str().unwrap());
    assert_eq!(url, format!("http://8000-{ID}.localhost:8088/"));
    let host = ("host", &url[7..url.len() - 1]);
    let (cookie, other) = (format!("a=b; pvmm-preview={token}"), format!("8001-{ID}.localhost"));
    for headers in [
        &[host][..],
        &[host, ("authorization", "Bearer wrong")],
        &[host, ("cookie", "pvmm-preview=wrong")],
        &[host, ("cookie", &cookie), ("origin", "http://localhost:8088")],
        &[("host", &other), ("cookie", &cookie)],
        &[("host", &other), ("x-pvmm-token", token)],
    ] {
        // The paths of the APIs are the guest's here.
        for path in ["/", "/v1/me", "/sandboxes", "/healthz", "/?pvmm-token=wrong"] {
            let answer = ask_with(&app, ("GET", path), headers, "").await;
            assert_eq!(answer.status, 401, "{headers:?} {path}");
        }
    }
    for headers in
        [&[host, bearer][..], &[host, ("cookie", &cookie)], &[host, ("x-pvmm-token", token)]]
    {
        let answer = ask_with(&app, ("GET", "/"), headers, "").await;
        assert!(answer.status.is_server_error(), "{headers:?} {}", answer.status);
    }
    let first = format!("/a?pvmm-token={token}&b");
    let opened = ask_with(&app, ("GET", &first), &[host, ("accept", "text/html")], "").await;
    assert_eq!(
        (opened.status, &opened.headers["location"]),
        (StatusCode::SEE_OTHER, &"/a?b".parse().unwrap())
    );
    assert!(ask_with(&app, ("GET", &first), &[host], "").await.status.is_server_error());
}

#[tokio::test]
async fn port_is_public_only_if_its_owner_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let app = with_lost_sandbox(dir.path());
    let path = |port: &str| format!("/v1/sandboxes/{ID}/ports/{port}");
    let host = format!("8000-{ID}.localhost");
    for (port, body, status) in
        [("8000", "{}", 400), ("0", "{\"public\":true}", 400), ("8000", "{\"public\":true}", 200)]
    {
        assert_eq!(ask_with(&app, ("GET", "/"), &[("host", &host)], "").await.status, 401);
        assert_eq!(ask(&app, "PUT", &path(port), "secret", body).await.status, status);
    }
    let answer = ask_with(&app, ("GET", "/"), &[("host", &host)], "").await;
    assert!(answer.status.is_server_error(), "{}", answer.status);
    assert!(app.store.sandboxes().unwrap()[0].is_public(8000));
    let closed = ask(&app, "PUT", &path("8000"), "secret", "{\"public\":false}").await;
    assert_eq!(closed.body["public"], false);
    assert_eq!(ask_with(&app, ("GET", "/"), &[("host", &host)], "").await.status, 401);
}

#[tokio::test]
async fn guest_sees_no_credential_of_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let stripped = |pairs: &[(&'static str, &str)]| {
        let pairs =
            pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
        let mut headers: axum::http::HeaderMap = pairs.collect();
        crate::credentials::strip(&app, &mut headers);
        headers.iter().map(|(_, value)| value.to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    for (name, value) in [
        ("authorization", "Bearer secret"),
        ("authorization", "Bearer pvmm_0123"),
        ("x-api-key", "secret"),
        ("x-access-token", "x"),
        ("e2b-traffic-access-token", "x"),
        ("x-pvmm-token", "x"),
        ("cookie", "pvmm-preview=x"),
    ] {
        assert!(stripped(&[(name, value)]).is_empty(), "{name}: {value}");
    }
    let own = [("authorization", "Basic dTpw"), ("cookie", "a=b; __Host-pvmm-preview=x; c=d")];
    assert_eq!(stripped(&own), ["Basic dTpw", "a=b; c=d"]);
}
