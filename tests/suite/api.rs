//! Wrong bodies for every path of the API, before the start, while the guest runs, and while it is
//! paused.

use pvmm_tests::firecracker::Firecracker;
use serde_json::{Value, json};

/// Bodies that only a request without a body accepts.
const BODIES: [&str; 9] = [
    "",
    "{}",
    "[]",
    "null",
    "{\"colour\":1}",
    "{\"drive_id\":\"rootfs\",\"path_on_host\":{\"a\":[[[]]]}}",
    "\"\\u0000\"",
    "1e400",
    "{\"state\":\"Sleeping\",\"action_type\":-1}",
];

/// Returns each operation of `docs/openapi.json`, with names of the guest's own drive and
/// interface.
fn operations() -> Vec<(String, String)> {
    let api: Value = serde_json::from_str(include_str!("../../docs/openapi.json")).unwrap();
    let paths = api["paths"].as_object().unwrap();
    let of = |(path, methods): (&String, &Value)| {
        let path = path.replace("{drive_id}", "rootfs").replace("{iface_id}", "1");
        let methods: Vec<_> = methods.as_object().unwrap().keys().cloned().collect();
        methods.into_iter().map(move |method| (method.to_uppercase(), path.clone()))
    };
    let known = |method: &str| ["GET", "PUT", "PATCH", "DELETE"].contains(&method);
    // These paths accept an empty body; other tests cover what they do then.
    let tried = |path: &str| !["/pvmm/checkpoint", "/pvmm/rollback"].contains(&path);
    paths.iter().flat_map(of).filter(|(method, path)| known(method) && tried(path)).collect()
}

#[test]
fn i2_wrong_bodies_for_every_path_are_answered_in_every_state_and_the_guest_lives() {
    let vm = Firecracker::new();
    let operations = operations();
    assert!(operations.len() > 30, "{operations:?}");
    let try_all = |state: &str| {
        for (method, path) in &operations {
            for body in BODIES {
                let len = body.len();
                let text =
                    format!("{method} {path} HTTP/1.1\r\nContent-Length: {len}\r\n\r\n{body}");
                let reply = vm.raw(text.as_bytes());
                assert!(
                    [200, 204, 400].contains(&reply.status),
                    "{method} {path} {body}: {reply:?}"
                );
            }
        }
        assert_eq!(vm.get("/")["state"], state);
    };
    try_all("Not started");
    vm.describe();
    vm.start();
    try_all("Running");
    assert_eq!(vm.prints("echo running"), "running");
    vm.patch("/vm", json!({"state": "Paused"}));
    try_all("Paused");
    vm.patch("/vm", json!({"state": "Resumed"}));
    assert_eq!(vm.prints("echo paused and resumed"), "paused and resumed");
}
