//! Preview addresses: a port of a sandbox at a host name of its own, such as
//! `http://8000-ID.localhost:8088/`.
//!
//! A browser shows its token once, in the query of the first address, and gets a cookie of that
//! host for it. Each port is an origin of its own, which the API is not: a page from a guest has no
//! token of the API, and the API takes no cookies. The credential does not go on to the guest.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::audit::Act;
use crate::credentials::{COOKIES, owner_of};
use crate::error::ApiError;
use crate::extract::text;
use crate::ids;
use crate::proxy;

/// The name in a query whose value is the token.
pub const PARAMETER: &str = "pvmm-token";
/// The headers that may carry the token: this server's own, and E2B's.
const HEADERS: [&str; 2] = ["x-pvmm-token", "e2b-traffic-access-token"];
/// The ports that E2B's clients take for commands, files and code. No guest serves them.
pub const E2B_PORTS: [u16; 2] = [49983, 49999];

/// A port of a sandbox, as a host name gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target<'a> {
    /// The id of the sandbox.
    pub id: &'a str,
    /// The port in the guest.
    pub port: u16,
}

impl<'a> Target<'a> {
    /// Reads a host name like `8000-ID.example.com`.
    pub fn of(host: &'a str) -> Option<Self> {
        let label = host.split(['.', ':']).next()?;
        let (port, id) = label.split_once('-')?;
        let digits = port.bytes().all(|byte| byte.is_ascii_digit());
        let port = port.parse().ok().filter(|port| digits && *port > 0)?;
        ids::is_id(id).then_some(Self { id, port })
    }

    /// Returns whether a request may go to the port.
    fn permit(self, app: &App, host: &str, headers: &HeaderMap) -> bool {
        let opens = |token: &str| app.key.opens_port(self.id, self.port, token);
        let by_header = HEADERS.iter().filter_map(|name| text(headers, name)).any(opens);
        let by_cookie = || !is_foreign(headers, host) && cookies(headers).any(opens);
        let is_public = || app.find(self.id).is_ok_and(|it| it.lock().row.is_public(self.port));
        by_header || owner_of(app, headers).is_some() || by_cookie() || is_public()
    }
}

/// Returns the tokens in the cookies of a request.
fn cookies(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let lines = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
    let pairs = lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.split_once('='));
    pairs.filter(|(name, _)| COOKIES.contains(&name.trim())).map(|(_, value)| value.trim())
}

/// Returns whether a browser sends a request for a page of another origin: a cookie then says
/// nothing about who asks. Opening an address in a window is not foreign.
fn is_foreign(headers: &HeaderMap, host: &str) -> bool {
    let origin = text(headers, "origin").map(|origin| {
        let (_, name) = origin.split_once("://").unwrap_or_default();
        !name.eq_ignore_ascii_case(host)
    });
    let fetch = |name: &str| text(headers, name).unwrap_or_default();
    let opened = fetch("sec-fetch-mode") == "navigate" && fetch("sec-fetch-dest") == "document";
    let elsewhere = matches!(fetch("sec-fetch-site"), "cross-site" | "same-site");
    origin.unwrap_or(false) || (elsewhere && !opened)
}

/// Takes the token out of a path with a query.
fn take_token(path: &str) -> (String, Option<&str>) {
    let Some((before, query)) = path.split_once('?') else { return (path.to_owned(), None) };
    fn value(pair: &str) -> Option<&str> {
        pair.strip_prefix(PARAMETER)?.strip_prefix('=')
    }
    let token = query.split('&').find_map(value);
    let rest: Vec<_> = query.split('&').filter(|pair| value(pair).is_none()).collect();
    let path = match rest[..] {
        [] => before.to_owned(),
        _ => format!("{before}?{}", rest.join("&")),
    };
    (path, token)
}

/// Returns whether a browser opens the address of a request as a page.
fn is_page(request: &Request) -> bool {
    let headers = request.headers();
    let html = text(headers, "accept").is_some_and(|accept| accept.contains("text/html"));
    request.method() == Method::GET && html && !headers.contains_key(header::UPGRADE)
}

/// Answers a request that has shown its token: the cookie, and the same address without the token.
fn remember(token: &str, path: &str, tls: bool) -> Result<Response, ApiError> {
    let cookie = if tls {
        format!("{}={token}; Path=/; HttpOnly; SameSite=Lax; Secure", COOKIES[1])
    } else {
        format!("{}={token}; Path=/; HttpOnly; SameSite=Lax", COOKIES[0])
    };
    // A path that began with two slashes would lead to another host.
    let path = format!("/{}", path.trim_start_matches(['/', '\\']));
    let mut response = StatusCode::SEE_OTHER.into_response();
    for (name, value) in [
        (header::LOCATION, &path[..]),
        (header::SET_COOKIE, &cookie),
        (header::CACHE_CONTROL, "no-store"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        let value = HeaderValue::from_str(value);
        let value = value.map_err(|_| ApiError::bad_request("the path is invalid"))?;
        response.headers_mut().insert(name, value);
    }
    Ok(response)
}

/// Leads requests for preview addresses to their guests, and all others on. E2B's own ports and
/// requests that name their sandbox in a header are E2B's.
pub async fn lead(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let host = text(request.headers(), header::HOST.as_str()).unwrap_or_default().to_owned();
    match Target::of(&host) {
        Some(target)
            if !E2B_PORTS.contains(&target.port)
                && !request.headers().contains_key("e2b-sandbox-id") =>
        {
            answer(&app, target, &host, request).await.unwrap_or_else(IntoResponse::into_response)
        }
        _ => next.run(request).await,
    }
}

async fn answer(
    app: &Arc<App>,
    target: Target<'_>,
    host: &str,
    request: Request,
) -> Result<Response, ApiError> {
    let Target { id, port } = target;
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let (path, token) = take_token(path);
    let permitted = match token {
        Some(token) => app.key.opens_port(id, port, token),
        None => target.permit(app, host, request.headers()),
    };
    if !permitted {
        let error = ApiError::unauthorized(format!(
            "this port needs its token: open the address that GET /v1/sandboxes/{id}/ports/{port} \
             of the service gives"
        ));
        let act = Act::new("refuse", "", id).what(&format!("port {port}"));
        app.audit.write(&act.outcome(&Err::<(), _>(error.clone())));
        return Err(error);
    }
    match token {
        Some(token) if is_page(&request) => remember(token, &path, app.options.tls.is_some()),
        _ => proxy::forward(app, id, port, &path, request).await,
    }
}

/// Returns the domain below which ports of sandboxes are found, from the host of a request.
pub fn domain(headers: &HeaderMap) -> Option<String> {
    let host = text(headers, header::HOST.as_str())?;
    let host = host.strip_prefix("api.").unwrap_or(host);
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => (name, Some(port)),
        _ => (host, None),
    };
    let name = match name.trim_matches(['[', ']']).parse::<IpAddr>() {
        Ok(address) if address.is_loopback() => "localhost",
        // Names below an address lead nowhere.
        Ok(_) => return None,
        Err(_) => name,
    };
    Some(port.map_or(name.to_owned(), |port| format!("{name}:{port}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn host_names_port_and_sandbox() {
        let id = &ids::new_id().unwrap()[..];
        let target = Some(Target { id, port: 8000 });
        for host in ["localhost:8088", "example.com", "localhost", "a.b."] {
            assert_eq!(Target::of(&format!("8000-{id}.{host}")), target, "{host}");
        }
        for host in ["localhost:8088", "127.0.0.1", "8000-web.localhost", "", "-", "8000-"] {
            assert_eq!(Target::of(host), None, "{host}");
        }
        for port in ["0", "+80", "65536", "", "-1", "8 0"] {
            assert_eq!(Target::of(&format!("{port}-{id}.localhost")), None, "{port}");
        }
    }

    #[test]
    fn token_is_taken_out_of_the_query() {
        for (path, rest, token) in [
            ("/", "/", None),
            ("/a?b=1", "/a?b=1", None),
            ("/a?pvmm-token=T", "/a", Some("T")),
            ("/a?b=1&pvmm-token=T&c", "/a?b=1&c", Some("T")),
            ("/a?pvmm-token=T&pvmm-token=U", "/a", Some("T")),
            ("/a?pvmm-tokens=T", "/a?pvmm-tokens=T", None),
            ("/a?", "/a?", None),
        ] {
            assert_eq!(take_token(path), (rest.to_owned(), token), "{path}");
        }
    }

    #[test]
    fn cookie_is_of_its_host_and_not_for_scripts() {
        let response = remember("T", "//evil.example/x?a=b", false).unwrap();
        assert_eq!(response.status(), StatusCode::SEE_OTHER);
        assert_eq!(response.headers()["location"], "/evil.example/x?a=b");
        let cookie = |tls| remember("T", "/", tls).unwrap().headers()["set-cookie"].clone();
        assert_eq!(cookie(false), "pvmm-preview=T; Path=/; HttpOnly; SameSite=Lax");
        assert_eq!(cookie(true), "__Host-pvmm-preview=T; Path=/; HttpOnly; SameSite=Lax; Secure");
    }

    #[test]
    fn cookie_counts_for_pages_of_the_same_origin_only() {
        let host = "8000-x.localhost:8088";
        let own = ("origin", "http://8000-X.localhost:8088");
        let document = ("sec-fetch-dest", "document");
        for (pairs, foreign) in [
            (&[][..], false),
            (&[own], false),
            (&[("origin", "http://8000-y.localhost:8088")], true),
            (&[("origin", "http://localhost:8088")], true),
            (&[("origin", "null")], true),
            (&[("sec-fetch-site", "same-origin")], false),
            (&[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "no-cors")], true),
            (&[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), document], false),
            (&[("sec-fetch-site", "same-site"), ("sec-fetch-mode", "navigate")], true),
        ] {
            assert_eq!(is_foreign(&headers(pairs), host), foreign, "{pairs:?}");
        }
        let several = headers(&[("cookie", "a=b; pvmm-preview=x;__Host-pvmm-preview=y")]);
        assert_eq!(cookies(&several).collect::<Vec<_>>(), ["x", "y"]);
    }

    #[test]
    fn domain_is_a_name_that_others_can_be_below() {
        let of = |host: &str| domain(&headers(&[("host", host)]));
        assert_eq!(of("127.0.0.1:8088").unwrap(), "localhost:8088");
        assert_eq!(of("[::1]:8088").unwrap(), "localhost:8088");
        assert_eq!(of("api.example.com").unwrap(), "example.com");
        assert_eq!(of("box:1").unwrap(), "box:1");
        assert_eq!(of("192.0.2.1:8088"), None);
    }
}
