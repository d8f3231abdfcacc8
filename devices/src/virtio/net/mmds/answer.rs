//! The response of the metadata service to a request.
//!
//! The content is one JSON value and a path is a JSON pointer into it. A value is returned as JSON
//! if the request accepts that, otherwise in the format of cloud instance metadata: a string as
//! plain text, an object as its keys.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::config::{MmdsConfig, MmdsVersion};
use super::http::{MmdsAnswer, MmdsRequest};
use super::token::{TTL_SECONDS_MAX, Tokens};

const TOKEN_PATH: &str = "/latest/api/token";
const TOKEN: [&str; 2] = ["X-metadata-token", "X-aws-ec2-metadata-token"];
const TTL: [&str; 2] = ["X-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token-ttl-seconds"];

/// Answers one request.
pub fn answer(
    config: &MmdsConfig,
    content: &Value,
    tokens: &mut Tokens,
    request: &MmdsRequest,
    now: Instant,
) -> MmdsAnswer {
    match request.method {
        "GET" => get(config, content, tokens, request, now),
        "PUT" => put(tokens, request, now),
        method => {
            let extra = Some("Allow: GET, PUT".to_owned());
            let text = format!("{method} is not possible here; use GET, or PUT {TOKEN_PATH}");
            MmdsAnswer { extra, ..MmdsAnswer::text(405, text) }
        }
    }
}

/// Answers a GET. Version 1 accepts requests with or without a token.
fn get(
    config: &MmdsConfig,
    content: &Value,
    tokens: &Tokens,
    request: &MmdsRequest,
    now: Instant,
) -> MmdsAnswer {
    if config.version == MmdsVersion::V2 {
        match request.header(&TOKEN) {
            None => {
                return MmdsAnswer::text(401, format!("send a token in the header {}", TOKEN[0]));
            }
            Some((_, token)) if !tokens.is_valid(token, now) => {
                let text = format!("the token is not valid; get a new one with PUT {TOKEN_PATH}");
                return MmdsAnswer::text(401, text);
            }
            Some(_) => {}
        }
    }
    let path = tidy(request.path);
    let Some(value) = content.pointer(&path) else {
        return MmdsAnswer::text(404, format!("there is nothing at {}", request.path));
    };
    if wants_json(request) && !config.imds_compat {
        return MmdsAnswer { json: true, ..MmdsAnswer::text(200, value.to_string()) };
    }
    match plain(value) {
        Some(text) => MmdsAnswer::text(200, text),
        None => {
            MmdsAnswer::text(501, "neither a string nor an object; send Accept: application/json")
        }
    }
}

fn put(tokens: &mut Tokens, request: &MmdsRequest, now: Instant) -> MmdsAnswer {
    // A proxy that forwards requests must not obtain a token for others.
    if request.header(&["X-Forwarded-For"]).is_some() {
        return MmdsAnswer::text(400, "a forwarded request gets no token");
    }
    if tidy(request.path) != TOKEN_PATH {
        return MmdsAnswer::text(404, format!("only {TOKEN_PATH} can be PUT"));
    }
    let range = format!("a number from 1 to {TTL_SECONDS_MAX}");
    let Some((header, seconds)) = request.header(&TTL) else {
        return MmdsAnswer::text(
            400,
            format!("send how long the token is to live: {}: {range}", TTL[0]),
        );
    };
    let ttl = seconds.parse::<u32>().ok().filter(|ttl| (1..=TTL_SECONDS_MAX).contains(ttl));
    let Some(ttl) = ttl else {
        return MmdsAnswer::text(400, format!("{header} must be {range}"));
    };
    match tokens.give(Duration::from_secs(ttl.into()), now) {
        Ok(token) => {
            MmdsAnswer { extra: Some(format!("{header}: {ttl}")), ..MmdsAnswer::text(200, token) }
        }
        Err(error) => {
            log::error!("metadata service: no random bytes for a token: {error}");
            MmdsAnswer::text(501, "no token can be made now")
        }
    }
}

/// Converts a path to a JSON pointer: without doubled or trailing slashes.
fn tidy(path: &str) -> String {
    let mut tidy = String::with_capacity(path.len());
    for byte in path.chars() {
        if byte != '/' || !tidy.ends_with('/') {
            tidy.push(byte);
        }
    }
    if tidy.ends_with('/') {
        tidy.pop();
    }
    tidy
}

fn wants_json(request: &MmdsRequest) -> bool {
    let accept = request.header(&["Accept"]).map_or("", |(_, value)| value);
    let mut kinds = accept.split(',').map(|kind| kind.split(';').next().unwrap_or("").trim());
    kinds.any(|kind| kind.eq_ignore_ascii_case("application/json"))
}

fn plain(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(entries) => {
            let line = |(key, value): (&String, &Value)| {
                if value.is_object() { format!("{key}/") } else { key.clone() }
            };
            Some(entries.iter().map(line).collect::<Vec<_>>().join("\n"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::http::{Found, read};
    use super::*;

    fn ask(version: MmdsVersion, imds_compat: bool, tokens: &mut Tokens, text: &str) -> MmdsAnswer {
        let content = serde_json::json!({
            "latest": { "meta-data": { "id": "i-1", "more": { "a": 1 } }, "n": 43, "list": [1, "b"] }
        });
        let config = MmdsConfig { version, imds_compat, ..MmdsConfig::default() };
        let bytes = format!("{text}\r\n\r\n");
        let Found::MmdsRequest(request, _) = read(bytes.as_bytes()) else { panic!("{text}") };
        answer(&config, &content, tokens, &request, Instant::now())
    }

    fn v1(text: &str) -> (u16, String) {
        let answer = ask(MmdsVersion::V1, false, &mut Tokens::default(), text);
        (answer.status, answer.body)
    }

    #[test]
    fn value_is_given_as_text_or_as_json() {
        let said = |path: &str| v1(&format!("GET {path} HTTP/1.1"));
        assert_eq!(said("/latest/meta-data/id"), (200, "i-1".into()));
        assert_eq!(said("//latest///meta-data/"), (200, "id\nmore/".into()));
        assert_eq!(said("/"), (200, "latest/".into()));
        assert_eq!(said("/latest/n").0, 501);
        assert_eq!(said("/latest/none").0, 404);
        let json = |path: &str| v1(&format!("GET {path} HTTP/1.1\r\nAccept: application/json"));
        assert_eq!(json("/latest/n"), (200, "43".into()));
        assert_eq!(json("/latest/list/1"), (200, "\"b\"".into()));
        assert_eq!(json("/latest/meta-data"), (200, r#"{"id":"i-1","more":{"a":1}}"#.into()));
    }

    #[test]
    fn imds_compat_ignores_what_is_accepted() {
        let text = "GET /latest/meta-data/id HTTP/1.1\r\nAccept: application/json";
        let answer = ask(MmdsVersion::V1, true, &mut Tokens::default(), text);
        assert_eq!((answer.status, answer.json, &*answer.body), (200, false, "i-1"));
    }

    #[test]
    fn version_2_wants_a_token_that_it_gave() {
        let mut tokens = Tokens::default();
        let mut v2 = |text: &str| ask(MmdsVersion::V2, false, &mut tokens, text);
        let get = "GET /latest/meta-data/id HTTP/1.1";
        assert_eq!(v2(get).status, 401);
        assert_eq!(v2(&format!("{get}\r\nX-metadata-token: nonsense")).status, 401);
        for (ttl, token) in TTL.iter().zip(TOKEN) {
            let given = v2(&format!("PUT /latest/api/token HTTP/1.1\r\n{ttl}: 60"));
            assert_eq!((given.status, given.extra), (200, Some(format!("{ttl}: 60"))));
            let answer = v2(&format!("{get}\r\n{token}: {}", given.body));
            assert_eq!((answer.status, &*answer.body), (200, "i-1"));
        }
    }

    #[test]
    fn token_is_refused_without_or_with_a_wrong_lifetime_and_when_forwarded() {
        let put = "PUT /latest/api/token HTTP/1.1";
        let ttl = TTL[0];
        assert_eq!(v1(put).0, 400);
        for wrong in ["0", "21601", "-1", "abc", "4294967296"] {
            assert_eq!(v1(&format!("{put}\r\n{ttl}: {wrong}")).0, 400, "{wrong}");
        }
        assert_eq!(v1(&format!("{put}\r\n{ttl}: 60\r\nx-forwarded-for: 10.0.0.1")).0, 400);
        assert_eq!(v1(&format!("PUT /other HTTP/1.1\r\n{ttl}: 60")).0, 404);
        assert_eq!(v1("POST / HTTP/1.1").0, 405);
        // Version 1 issues tokens too, so that a guest can be moved to version 2.
        assert_eq!(v1(&format!("{put}\r\n{ttl}: 21600")).0, 200);
    }
}
