//! Requests of honest and hostile clients, in one piece and in many.

use std::cell::Cell;

use super::*;
use crate::secrets::SecretValue;

const PLACEHOLDER: &str = "pvmm-secret-00112233445566778899aabbccddeeff";

fn secret(value: &str) -> Rc<Secret> {
    Rc::new(Secret {
        name: "TOKEN".to_owned(),
        host: "api.example".to_owned(),
        placeholder: PLACEHOLDER.to_owned(),
        value: SecretValue::new(value.to_owned()),
        uses: Cell::new(0),
    })
}

fn requests(secret: &Rc<Secret>) -> Requests {
    Requests::new("api.example".to_owned(), 443, vec![secret.clone()])
}

/// Returns what the server gets of a stream that arrives in pieces of this size.
fn sent_in(stream: &[u8], size: usize) -> Result<String, &'static str> {
    let (mut requests, mut output) = (requests(&secret("hunter2")), Vec::new());
    for piece in stream.chunks(size) {
        requests.push(piece, &mut output).map_err(|refusal| refusal.0)?;
    }
    Ok(String::from_utf8(output).unwrap())
}

fn sent(stream: &str) -> Result<String, &'static str> {
    let whole = sent_in(stream.as_bytes(), usize::MAX);
    for size in [1, 2, 7, 50] {
        let pieces = sent_in(stream.as_bytes(), size);
        assert_eq!(pieces.is_ok(), whole.is_ok(), "{stream:?} in pieces of {size}");
        if whole.is_ok() {
            assert_eq!(pieces, whole, "pieces of {size}");
        }
    }
    whole
}

fn get(headers: &str) -> String {
    format!("GET /a?b HTTP/1.1\r\nHost: api.example\r\n{headers}\r\n")
}

#[test]
fn placeholder_in_any_header_value_becomes_the_value_however_it_is_cut() {
    let headers = format!(
        "Authorization: Bearer {PLACEHOLDER}\r\nX-Key:{PLACEHOLDER}\r\nCookie: a={PLACEHOLDER}; \
         b={PLACEHOLDER}\r\nAccept: */*\r\n"
    );
    let expected = get("Authorization: Bearer hunter2\r\nX-Key: hunter2\r\n\
                        Cookie: a=hunter2; b=hunter2\r\nAccept: */*\r\n");
    assert_eq!(sent(&get(&headers)).unwrap(), expected);
}

#[test]
fn placeholder_in_basic_authentication_becomes_the_value() {
    let encoded = BASE64.encode(format!("user:{PLACEHOLDER}"));
    let expected = BASE64.encode("user:hunter2");
    let got = sent(&get(&format!("Authorization: Basic {encoded}\r\n"))).unwrap();
    assert_eq!(got, get(&format!("Authorization: Basic {expected}\r\n")));
    let other = get("Authorization: Basic dXNlcjp4\r\n");
    assert_eq!(sent(&other).unwrap(), other);
}

#[test]
fn placeholder_outside_header_values_stays() {
    let body = format!("{{\"key\": \"{PLACEHOLDER}\"}}");
    let stream = format!(
        "POST /{PLACEHOLDER} HTTP/1.1\r\nHost: api.example\r\n{PLACEHOLDER}: x\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    assert_eq!(sent(&stream).unwrap(), stream);
    let chunked = format!(
        "POST / HTTP/1.1\r\nHost: api.example\r\nTransfer-Encoding: chunked\r\n\r\n\
         {:x}\r\n{body}\r\n0\r\nX-Trailer: {PLACEHOLDER}\r\n\r\n",
        body.len()
    );
    assert_eq!(sent(&chunked).unwrap(), chunked);
}

#[test]
fn every_request_of_a_connection_is_rewritten_and_counted() {
    let secret = secret("hunter2");
    let (mut requests, mut output) = (requests(&secret), Vec::new());
    let one = get(&format!("X-Key: {PLACEHOLDER}\r\nX-Other: {PLACEHOLDER}\r\n"));
    let body = "POST / HTTP/1.1\r\nHost: api.example:443\r\nContent-Length: 3\r\n\r\nabc";
    let stream = [one.as_str(), body, &one].concat();
    requests.push(stream.as_bytes(), &mut output).unwrap();
    assert!(requests.place == Place::Head && requests.held.is_empty());
    let text = String::from_utf8(output).unwrap();
    assert_eq!(text.matches("hunter2").count(), 4);
    assert!(!text.contains(PLACEHOLDER));
    assert_eq!(secret.uses.get(), 2);
}

#[test]
fn d14_request_for_another_host_is_refused() {
    for request in [
        "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: api.example.evil.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: api.example:8443\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: user@api.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost:\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: api.example\r\nHost: api.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: api.example\r\nhost: evil.example\r\n\r\n",
        "GET https://evil.example/ HTTP/1.1\r\nHost: api.example\r\n\r\n",
        "GET //evil.example@/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "CONNECT evil.example:443 HTTP/1.1\r\nHost: api.example\r\n\r\n",
    ] {
        assert!(sent(request).is_err(), "{request:?}");
    }
    // A second request is judged like the first.
    let second = get("") + "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n";
    assert!(sent(&second).is_err());
}

#[test]
fn d14_request_that_can_be_read_in_two_ways_is_refused() {
    let post = |headers: &str| format!("POST / HTTP/1.1\r\nHost: api.example\r\n{headers}\r\n");
    for headers in [
        "Content-Length: 3\r\nContent-Length: 3\r\n",
        "Content-Length: 3\r\nContent-Length: 30\r\n",
        "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 3, 3\r\n",
        "Content-Length: +3\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: 0x3\r\n",
        "Content-Length: \r\n",
        "Content-Length: 99999999999999999999\r\n",
        "Content_Length: 3\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer_Encoding: chunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        "X-A: 1\r\n Transfer-Encoding: chunked\r\n",
        "X-A: 1\r\n\tfolded\r\n",
        "X-A: 1\nX-B: 2\r\n",
        "X-A: 1\rX-B: 2\r\n",
        "X-A: 1\r\r\n",
        "X-A: \0\r\n",
        "X-A\r\n",
        ": x\r\n",
        "X A: 1\r\n",
    ] {
        assert!(sent(&post(headers)).is_err(), "{headers:?}");
    }
    for start in [
        "GET  / HTTP/1.1",
        "GET / HTTP/1.1 ",
        "GET /",
        "GET / HTTP/2.0",
        "GET / HTTP/0.9",
        "GET /a b HTTP/1.1",
        "GET /\u{e9} HTTP/1.1",
        "G(T / HTTP/1.1",
        "TRACE / HTTP/1.1",
        "PRI * HTTP/2.0",
        "\r\nGET / HTTP/1.1",
    ] {
        assert!(sent(&format!("{start}\r\nHost: api.example\r\n\r\n")).is_err(), "{start:?}");
    }
    let old = "POST / HTTP/1.0\r\nHost: api.example\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert!(sent(old).is_err());
}

#[test]
fn d14_chunks_that_lie_are_refused() {
    let head = "POST / HTTP/1.1\r\nHost: api.example\r\nTransfer-Encoding: chunked\r\n\r\n";
    for body in [
        "3\r\nabcd\r\n0\r\n\r\n",
        "3\nabc\r\n0\r\n\r\n",
        "3;a=b\r\nabc\r\n0\r\n\r\n",
        "0x3\r\nabc\r\n0\r\n\r\n",
        " 3\r\nabc\r\n0\r\n\r\n",
        "-3\r\nabc\r\n0\r\n\r\n",
        "ffffffffffffffff\r\n",
        "10000000000000000\r\n",
        "\r\nabc",
        "0\r\n folded: x\r\n\r\n",
    ] {
        assert!(sent(&format!("{head}{body}")).is_err(), "{body:?}");
    }
}

#[test]
fn d14_body_that_looks_like_a_request_is_a_body() {
    let hidden = get(&format!("X-Key: {PLACEHOLDER}\r\n"));
    let stream = format!(
        "POST / HTTP/1.1\r\nHost: api.example\r\nContent-Length: {}\r\n\r\n{hidden}",
        hidden.len()
    );
    assert_eq!(sent(&stream).unwrap(), stream);
}

#[test]
fn headers_have_a_bound_before_and_after_the_values() {
    let long = get(&format!("X-A: {}\r\n", "a".repeat(HEAD_MAX)));
    assert!(sent_in(long.as_bytes(), 4000).is_err());
    let endless = vec![b'a'; HEAD_MAX + 1];
    assert!(sent_in(&endless, 4000).is_err());
    let (mut requests, mut output) = (requests(&secret(&"v".repeat(8 << 10))), Vec::new());
    let many = get(&format!("X-A: {}\r\n", PLACEHOLDER.repeat(1000)));
    assert!(requests.push(many.as_bytes(), &mut output).is_err());
    assert!(output.is_empty());
}

#[test]
fn after_an_upgrade_bytes_pass_and_nothing_is_replaced() {
    let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n";
    let stream = get(upgrade) + "\n\x00 " + PLACEHOLDER;
    assert_eq!(sent(&stream).unwrap(), stream);
}
