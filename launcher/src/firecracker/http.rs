//! Parses HTTP requests from bytes and serializes answers into bytes. No sockets here.
//!
//! Stricter than HTTP requires wherever ambiguity could be exploited: the length of a body is one
//! plain number, or the request is refused.

use serde::Serialize;

/// The longest request line and headers; more than any benign client sends.
const HEAD_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    Get,
    Put,
    Patch,
    Delete,
}

impl Method {
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Put => "PUT",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpRequest {
    pub method: Method,
    /// The path, without scheme and host if the client sent them.
    pub path: String,
    /// `None` if there was no body, or an empty one.
    pub body: Option<Vec<u8>>,
    /// The client wants the connection closed after the answer.
    pub close: bool,
}

/// The status and body of a response, and how it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub body: Option<String>,
    /// The request used a deprecated feature.
    pub deprecated: bool,
    /// The connection is closed after this answer.
    pub close: bool,
}

/// Why a request is refused: the status and a one-line message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: u16,
    pub message: String,
}

impl Refusal {
    pub fn bad(message: impl Into<String>) -> Self {
        Self { status: 400, message: message.into() }
    }
}

impl Answer {
    pub fn done() -> Self {
        Self { status: 204, body: None, deprecated: false, close: false }
    }

    pub fn json(value: &impl Serialize) -> Self {
        match serde_json::to_string(value) {
            Ok(body) => Self { status: 200, body: Some(body), ..Self::done() },
            Err(error) => Refusal { status: 500, message: error.to_string() }.into(),
        }
    }

    /// Serializes the response.
    pub fn bytes(&self) -> Vec<u8> {
        let connection = if self.close { "close" } else { "keep-alive" };
        let mut text = format!(
            "HTTP/1.1 {} \r\nServer: Firecracker API\r\nConnection: {connection}\r\n",
            self.status
        );
        if self.deprecated {
            text.push_str("Deprecation: true\r\n");
        }
        if let Some(body) = &self.body {
            let len = body.len();
            text.push_str(&format!(
                "Content-Type: application/json\r\nContent-Length: {len}\r\n\r\n{body}"
            ));
        } else {
            text.push_str("\r\n");
        }
        text.into_bytes()
    }
}

impl From<Refusal> for Answer {
    fn from(refusal: Refusal) -> Self {
        let body = serde_json::json!({ "fault_message": refusal.message }).to_string();
        Self { status: refusal.status, body: Some(body), ..Self::done() }
    }
}

/// The result of parsing the bytes received so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// The bytes are the beginning of a request.
    Incomplete {
        /// The client waits for `100 Continue` before it sends the body.
        expects_continue: bool,
    },
    /// A complete request, and its length in bytes.
    Whole(HttpRequest, usize),
}

/// Parses the first request of `bytes`. After an error the start of the next request is unknown.
pub fn parse(bytes: &[u8], body_max: usize) -> Result<Parsed, Refusal> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Request::new(&mut headers);
    let head_len = match head.parse(bytes) {
        Ok(httparse::Status::Complete(len)) if len <= HEAD_MAX => len,
        Ok(httparse::Status::Partial) if bytes.len() <= HEAD_MAX => {
            return Ok(Parsed::Incomplete { expects_continue: false });
        }
        Ok(_) => {
            let message =
                format!("The request's line and headers are longer than {HEAD_MAX} bytes.");
            return Err(Refusal { status: 431, message });
        }
        Err(error) => return Err(Refusal::bad(format!("Not an HTTP request: {error}."))),
    };
    let method = match head.method.unwrap_or_default() {
        "GET" => Method::Get,
        "PUT" => Method::Put,
        "PATCH" => Method::Patch,
        "DELETE" => Method::Delete,
        other => return Err(Refusal::bad(format!("Unsupported HTTP method: {other}."))),
    };
    let path = path_of(head.path.unwrap_or_default())?;
    let facts = Facts::of(head.headers)?;
    let len = facts.length.unwrap_or(0);
    if len > body_max as u64 {
        return Err(Refusal::bad(format!(
            "Request payload with size {len} is larger than the limit of {body_max} allowed by server."
        )));
    }
    let end = head_len + len as usize;
    let Some(body) = bytes.get(head_len..end) else {
        return Ok(Parsed::Incomplete { expects_continue: facts.expects_continue });
    };
    let body = (!body.is_empty()).then(|| body.to_vec());
    // HTTP/1.0 connections stay open too: Firecracker keeps them open, and clients rely on it.
    let close = facts.close;
    Ok(Parsed::Whole(HttpRequest { method, path, body, close }, end))
}

/// The header fields that affect how the request is read.
#[derive(Debug, Default)]
struct Facts {
    length: Option<u64>,
    expects_continue: bool,
    close: bool,
}

impl Facts {
    fn of(headers: &[httparse::Header<'_>]) -> Result<Self, Refusal> {
        let mut facts = Self::default();
        for header in headers {
            let value = || String::from_utf8_lossy(header.value).trim().to_ascii_lowercase();
            if header.name.eq_ignore_ascii_case("content-length") {
                let wrong =
                    || Refusal::bad(format!("Invalid value of Content-Length: {}.", value()));
                let digits = value();
                // A plain number: `u64::from_str` alone would take a plus sign.
                if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Err(wrong());
                }
                let length = digits.parse().map_err(|_| wrong())?;
                if facts.length.is_some_and(|before| before != length) {
                    return Err(Refusal::bad("Two different Content-Length headers."));
                }
                facts.length = Some(length);
            } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
                return Err(Refusal::bad(
                    "Transfer-Encoding is not supported; send Content-Length.",
                ));
            } else if header.name.eq_ignore_ascii_case("expect") {
                if value() != "100-continue" {
                    return Err(Refusal { status: 417, message: "Unknown expectation.".into() });
                }
                facts.expects_continue = true;
            } else if header.name.eq_ignore_ascii_case("connection") {
                facts.close |= value().split(',').any(|word| word.trim() == "close");
            }
        }
        Ok(facts)
    }
}

/// Returns the path of a request target, which may be an absolute URI.
fn path_of(target: &str) -> Result<String, Refusal> {
    let path = match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').map_or("/", |start| &rest[start..]),
        None => target,
    };
    if path.starts_with('/') {
        Ok(path.to_owned())
    } else {
        Err(Refusal::bad("Invalid URI: it begins with no slash."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: usize = 51200;

    fn whole(text: &str) -> HttpRequest {
        match parse(text.as_bytes(), MAX) {
            Ok(Parsed::Whole(request, len)) => {
                assert_eq!(len, text.len());
                request
            }
            other => panic!("{other:?}"),
        }
    }

    fn refused(text: &str) -> u16 {
        parse(text.as_bytes(), MAX).unwrap_err().status
    }

    #[test]
    fn request_without_any_header_but_its_length_is_read() {
        let request = whole("PUT /boot-source HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}");
        assert_eq!(request.method, Method::Put);
        assert_eq!(request.path, "/boot-source");
        assert_eq!(request.body.as_deref(), Some(&b"{}"[..]));
        assert_eq!(whole("GET / HTTP/1.1\r\n\r\n").body, None);
        assert_eq!(whole("GET / HTTP/1.1\r\nContent-Length: 0\r\n\r\n").body, None);
    }

    #[test]
    fn request_for_a_whole_address_is_for_its_path() {
        assert_eq!(whole("GET http://localhost/vm/config HTTP/1.1\r\n\r\n").path, "/vm/config");
        assert_eq!(whole("GET http://localhost HTTP/1.1\r\n\r\n").path, "/");
        assert_eq!(refused("GET version HTTP/1.1\r\n\r\n"), 400);
    }

    #[test]
    fn i1_length_that_is_no_plain_number_is_refused() {
        for length in ["-1", "+5", "", "0x10", "5, 5", "99999999999999999999999", "1e3"] {
            let text = format!("PUT /mmds HTTP/1.1\r\nContent-Length: {length}\r\n\r\n");
            assert_eq!(refused(&text), 400, "{length}");
        }
        let two = "PUT /mmds HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n";
        assert_eq!(refused(two), 400);
        assert_eq!(refused("PUT /mmds HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"), 400);
    }

    #[test]
    fn i2_body_of_one_byte_too_many_is_refused_before_it_comes() {
        let text = |len| format!("PUT /mmds HTTP/1.1\r\nContent-Length: {len}\r\n\r\n");
        let more = Parsed::Incomplete { expects_continue: false };
        assert_eq!(parse(text(51200).as_bytes(), MAX), Ok(more));
        let refusal = parse(text(51201).as_bytes(), MAX).unwrap_err();
        assert_eq!(refusal.status, 400);
        assert!(refusal.message.contains("size 51201 is larger than the limit of 51200"));
    }

    #[test]
    fn i1_endless_head_is_refused() {
        let endless = format!("GET / HTTP/1.1\r\nx: {}", "a".repeat(HEAD_MAX));
        assert_eq!(refused(&endless), 431);
        let long = format!("{endless}\r\n\r\n");
        assert_eq!(refused(&long), 431);
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(HEADERS_MAX + 1));
        assert_eq!(refused(&many), 400);
    }

    #[test]
    fn garbage_is_refused_and_a_beginning_is_waited_for() {
        for text in ["\0\0\0", "POST / HTTP/1.1\r\n\r\n", "GET / HTTP/2.0\r\n\r\n", "GET /\r\n\r\n"]
        {
            assert_eq!(refused(text), 400, "{text:?}");
        }
        for text in ["", "G", "GET / HTTP/1.1\r\n", "PUT / HTTP/1.1\r\nContent-Length: 3\r\n\r\nab"]
        {
            let parsed = parse(text.as_bytes(), MAX);
            assert_eq!(parsed, Ok(Parsed::Incomplete { expects_continue: false }), "{text:?}");
        }
    }

    #[test]
    fn second_request_in_the_same_bytes_is_left_there() {
        let bytes = b"GET /version HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n";
        let Ok(Parsed::Whole(first, len)) = parse(bytes, MAX) else { panic!() };
        assert_eq!(first.path, "/version");
        let Ok(Parsed::Whole(second, _)) = parse(&bytes[len..], MAX) else { panic!() };
        assert_eq!(second.path, "/");
    }

    #[test]
    fn expectation_and_close_are_heard() {
        let head = "PUT / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n";
        let waiting = parse(head.as_bytes(), MAX);
        assert_eq!(waiting, Ok(Parsed::Incomplete { expects_continue: true }));
        assert!(whole("GET / HTTP/1.1\r\nConnection: close\r\n\r\n").close);
        assert!(!whole("GET / HTTP/1.0\r\n\r\n").close);
        assert!(!whole("GET / HTTP/1.1\r\n\r\n").close);
    }

    #[test]
    fn answer_on_the_wire_is_what_clients_of_firecracker_read() {
        let done = Answer::done().bytes();
        let text = "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n";
        assert_eq!(String::from_utf8(done).unwrap(), text);
        let refused = Answer::from(Refusal::bad("no \"such\" path"));
        assert_eq!(refused.body.as_deref(), Some(r#"{"fault_message":"no \"such\" path"}"#));
        assert!(String::from_utf8(refused.bytes()).unwrap().contains("Content-Length: 36\r\n"));
    }
}
