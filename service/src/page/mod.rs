//! The page for people at `/`: plain HTML with a script and a style sheet, all in this program.
//!
//! The files hold nothing secret and need no token. The script asks for one, and then uses the
//! ordinary API.

use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderName, header};
use axum::response::IntoResponse;
use axum::routing::get;

use crate::app::App;

/// The parts of the page: path, media type, content.
const PARTS: [(&str, &str, &str); 5] = [
    ("/", "text/html; charset=utf-8", include_str!("index.html")),
    ("/page/page.js", "text/javascript; charset=utf-8", include_str!("page.js")),
    ("/page/tree.js", "text/javascript; charset=utf-8", include_str!("tree.js")),
    ("/page/page.css", "text/css; charset=utf-8", include_str!("page.css")),
    ("/page/icon.svg", "image/svg+xml", include_str!("icon.svg")),
];

/// Only this server's own files, in no frame, and no form that is sent by the browser itself.
const POLICY: &str = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

const HEADERS: [(HeaderName, &str); 4] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-cache"),
];

/// Returns whether a path is a part of the page, for which no token is needed.
pub fn is_part(path: &str) -> bool {
    PARTS.iter().any(|(part, ..)| *part == path)
}

/// Returns the routes of the page.
pub fn routes() -> Router<Arc<App>> {
    PARTS.into_iter().fold(Router::new(), |router, (path, kind, content)| {
        let answer = move || async move {
            ([(header::CONTENT_TYPE, kind)], HEADERS, content).into_response()
        };
        router.route(path, get(answer))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The policy forbids the rest; here it is found before a browser does.
    #[test]
    fn page_has_no_outside_request_and_no_inline_code() {
        let [(.., html), (.., script), (.., tree), (.., style), _] = PARTS;
        for text in [html, script, tree, style] {
            let addresses = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!addresses.contains("//localhost") && !addresses.contains("http"), "{text}");
        }
        for word in ["<style", "style=", "onclick", "<script>", "javascript:"] {
            assert!(!html.contains(word), "{word}");
        }
    }

    /// Text of a guest must never become markup.
    #[test]
    fn script_makes_no_markup_from_text() {
        let script = concat!(include_str!("page.js"), include_str!("tree.js"));
        for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!script.contains(word), "{word}");
        }
    }
}
