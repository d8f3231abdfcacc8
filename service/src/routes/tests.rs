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
        default_egress: Vec::new(),
        with_parent: false,
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
        for path in ["/v1/me", "/v1/nope", "/v1/databases", "/"] {
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
        ("GET", "/", 404),
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
    let start = call("/process.Process/Start").await;
    assert_eq!((start.status, start.body), (StatusCode::OK, Value::Null));
}
