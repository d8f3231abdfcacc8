//! The credentials that requests carry: who they are of, and how they are kept from guests.

use axum::http::{HeaderMap, HeaderValue, header};

use crate::app::App;
use crate::extract::text;
use crate::ids::TOKEN_PREFIX;

/// Headers with credentials of a sandbox, which no program in a guest is meant to see.
const OF_SANDBOXES: [&str; 3] = ["x-pvmm-token", "e2b-traffic-access-token", "x-access-token"];
/// The names of the cookie of a preview address: over plain HTTP, and over TLS, where browsers bind
/// it to its host.
pub const COOKIES: [&str; 2] = ["pvmm-preview", "__Host-pvmm-preview"];

/// Returns the prefix of the server's token that a request carries.
pub fn owner_of(app: &App, headers: &HeaderMap) -> Option<String> {
    let bearer = || {
        let (scheme, token) = text(headers, header::AUTHORIZATION.as_str())?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
    };
    app.tokens.check(text(headers, "x-api-key").or_else(bearer)?)
}

/// Removes credentials of this server from a request to a guest. A program in the guest may have
/// users of its own, so what is no token of this server stays.
pub fn strip(app: &App, headers: &mut HeaderMap) {
    for name in OF_SANDBOXES {
        headers.remove(name);
    }
    for name in ["authorization", "x-api-key"] {
        let value = text(headers, name).unwrap_or_default();
        let word = value.rsplit(' ').next().unwrap_or_default();
        if value.contains(TOKEN_PREFIX) || app.tokens.check(word).is_some() {
            headers.remove(name);
        }
    }
    let kept = |part: &&str| !COOKIES.contains(&part.split('=').next().unwrap_or_default().trim());
    let lines: Vec<_> = headers.get_all(header::COOKIE).iter().cloned().collect();
    headers.remove(header::COOKIE);
    for line in lines.iter().filter_map(|line| line.to_str().ok()) {
        let parts: Vec<_> = line.split(';').map(str::trim).filter(kept).collect();
        if let Ok(value) = HeaderValue::try_from(parts.join("; "))
            && !value.is_empty()
        {
            headers.append(header::COOKIE, value);
        }
    }
}
