//! Bytes at the API socket: requests whole, cut and run together, and bodies that are almost right.
//!
//! The launcher is a program and no library, so its parsers are compiled here once more; they know
//! neither sockets nor machines.

#[path = "../../../launcher/src/firecracker/bodies/mod.rs"]
#[allow(dead_code, unused_imports)]
mod bodies;
#[path = "../../../launcher/src/firecracker/http.rs"]
#[allow(dead_code)]
mod http;
#[path = "../../../launcher/src/firecracker/routes.rs"]
#[allow(dead_code)]
mod routes;

use crate::input::Input;
use http::{Answer, Method, Parsed, Refusal};

const BODY_MAX: usize = 51200;

/// Lines that a head is put together from.
const LINES: [&str; 14] = [
    "GET / HTTP/1.1\r\n",
    "PUT /machine-config HTTP/1.1\r\n",
    "PATCH /vm HTTP/1.0\r\n",
    "DELETE http://localhost/drives/a HTTP/1.1\r\n",
    "POST / HTTP/1.1\r\n",
    "Content-Length: ",
    "content-length:0\r\n",
    "Content-Length: -1\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Expect: 100-continue\r\n",
    "Connection: close\r\n",
    "Host: x\r\n",
    "\r\n",
    "\r\n\r\n",
];

/// A connection's bytes, taken apart as the server does.
pub fn requests(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut stream = Vec::new();
    while !input.is_empty() {
        match input.below(4) {
            0 => stream.push(input.u8()),
            1 => stream.extend(format!("{}\r\n", input.number()).bytes()),
            _ => stream.extend(LINES[usize::from(input.below(14))].bytes()),
        }
    }
    let mut rest = stream.as_slice();
    while let Ok(Parsed::Whole(request, len)) = http::parse(rest, BODY_MAX) {
        assert!(len > 0 && len <= rest.len());
        assert!(request.body.as_ref().is_none_or(|body| body.len() <= BODY_MAX));
        // What follows a request changes nothing about it, and a part of it is none.
        assert_eq!(http::parse(&rest[..len], BODY_MAX), Ok(Parsed::Whole(request.clone(), len)));
        assert!(!matches!(http::parse(&rest[..len - 1], BODY_MAX), Ok(Parsed::Whole(..))));
        let routed = routes::route(request.method, &request.path, request.body.as_deref());
        answered(routed.map(drop));
        rest = &rest[len..];
    }
    if let Err(refusal) = http::parse(rest, BODY_MAX) {
        answered(Err(refusal));
    }
}

/// Requests that are right, for changes to start from.
const BODIES: [(Method, &str, &str); 16] = [
    (Method::Put, "/machine-config", r#"{"vcpu_count":2,"mem_size_mib":128,"smt":true}"#),
    (Method::Patch, "/machine-config", r#"{"vcpu_count":2}"#),
    (Method::Put, "/boot-source", r#"{"kernel_image_path":"/k","boot_args":"quiet"}"#),
    (
        Method::Put,
        "/drives/a",
        r#"{"drive_id":"a","is_root_device":true,"path_on_host":"/r","rate_limiter":{"ops":
           {"size":1,"refill_time":1}}}"#,
    ),
    (Method::Patch, "/drives/a", r#"{"drive_id":"a","path_on_host":"/r"}"#),
    (Method::Put, "/network-interfaces/1", r#"{"iface_id":"1","host_dev_name":"tap0"}"#),
    (Method::Put, "/vsock", r#"{"guest_cid":3,"uds_path":"/v"}"#),
    (Method::Put, "/balloon", r#"{"amount_mib":1,"deflate_on_oom":true}"#),
    (Method::Put, "/logger", r#"{"log_path":"/l","level":"Info"}"#),
    (Method::Put, "/mmds/config", r#"{"network_interfaces":["1"],"ipv4_address":"169.254.1.1"}"#),
    (Method::Put, "/mmds", r#"{"a":{"b":[1,"c",null]}}"#),
    (Method::Put, "/actions", r#"{"action_type":"InstanceStart"}"#),
    (Method::Patch, "/vm", r#"{"state":"Paused"}"#),
    (
        Method::Put,
        "/snapshot/load",
        r#"{"snapshot_path":"/s","mem_backend":{"backend_type":"File","backend_path":"/m"}}"#,
    ),
    (Method::Put, "/pvmm/exec", r#"{"argv":["true"],"env":{"A":"b"},"timeout_ms":5}"#),
    (Method::Put, "/pvmm/fork", r#"{"socket":"/f","children":2}"#),
];

/// The words that bodies are made of.
const TOKENS: [&str; 16] = [
    "null",
    "-1",
    "1e400",
    "NaN",
    "18446744073709551616",
    "256",
    "\"\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "[",
    "]",
    "{",
    "}",
    "true",
    ",\"vcpu_count\":1",
    "\"x\":",
];

/// One body, read as the request that it came with.
pub fn body(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (method, path, body) = BODIES[usize::from(input.below(16))];
    let mut body = body.as_bytes().to_vec();
    while !input.is_empty() {
        let at = usize::from(input.u16()) % (body.len() + 1);
        match input.below(6) {
            0 => body.truncate(at),
            1 => body.insert(at, input.u8()),
            2 => drop(body.splice(at..at, format!("{}", input.number()).bytes())),
            3 if at < body.len() => body[at] ^= 1 << input.below(8),
            4 => body.extend_from_within(at.saturating_sub(200)..at),
            _ => {
                let token = TOKENS[usize::from(input.below(16))].bytes();
                let end = (at + usize::from(input.below(8))).min(body.len());
                drop(body.splice(at..end, token));
            }
        }
        body.truncate(BODY_MAX);
    }
    answered(routes::route(method, path, Some(&body)).map(drop));
}

/// A refusal reaches its client as one whole answer.
fn answered(routed: Result<(), Refusal>) {
    let Err(refusal) = routed else { return };
    assert!(refusal.status >= 400);
    let bytes = Answer::from(refusal).bytes();
    let end = bytes.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap();
    assert_eq!(length.parse(), Ok(bytes.len() - end));
    let _: serde_json::Value = serde_json::from_slice(&bytes[end..]).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_that_changes_start_from_are_taken() {
        for (method, path, body) in BODIES {
            let routed = routes::route(method, path, Some(body.as_bytes()));
            assert!(routed.is_ok(), "{path}: {routed:?}");
        }
    }
}
