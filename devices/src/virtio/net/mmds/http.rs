//! The HTTP of the metadata service: parses one request from the received bytes, encodes one
//! response.
//!
//! There is no body to read: neither of the two supported methods has one.

use httparse::Status;

/// The maximum number of headers of a request.
const HEADERS_MAX: usize = 32;

/// A complete, well-formed request.
#[derive(Debug, PartialEq, Eq)]
pub struct MmdsRequest<'a> {
    pub method: &'a str,
    /// The path, including a query.
    pub path: &'a str,
    headers: Vec<(&'a str, &'a str)>,
    keep_alive: bool,
}

/// The result of parsing the received bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum Found<'a> {
    /// A request, and how many bytes it took.
    MmdsRequest(MmdsRequest<'a>, usize),
    /// The request is not complete yet.
    Part,
    /// Not a request; the connection cannot be used further.
    Bad(&'static str),
}

impl<'a> MmdsRequest<'a> {
    /// Returns the value of the first of `names` that is present, with the name.
    pub fn header<'n>(&self, names: &[&'n str]) -> Option<(&'n str, &'a str)> {
        names.iter().find_map(|name| {
            let found = self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name));
            found.map(|(_, value)| (*name, *value))
        })
    }

    /// Returns whether the peer keeps the connection open after the response.
    pub fn keeps_alive(&self) -> bool {
        self.keep_alive
    }
}

/// Parses the request at the start of `bytes`.
pub fn read(bytes: &[u8]) -> Found<'_> {
    let mut room = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut room);
    let len = match parsed.parse(bytes) {
        Ok(Status::Complete(len)) => len,
        Ok(Status::Partial) => return Found::Part,
        Err(httparse::Error::TooManyHeaders) => return Found::Bad("too many headers"),
        Err(_) => return Found::Bad("not an HTTP request"),
    };
    let (Some(method), Some(target), Some(minor_version)) =
        (parsed.method, parsed.path, parsed.version)
    else {
        return Found::Bad("not an HTTP request");
    };
    let mut headers = Vec::with_capacity(parsed.headers.len());
    for header in parsed.headers.iter() {
        let Ok(value) = std::str::from_utf8(header.value) else {
            return Found::Bad("a header is not text");
        };
        headers.push((header.name, value.trim()));
    }
    let mut request = MmdsRequest { method, path: target, headers, keep_alive: false };
    if request.header(&["Transfer-Encoding"]).is_some()
        || request.header(&["Content-Length"]).is_some_and(|(_, len)| len != "0")
    {
        return Found::Bad("a body has no place here");
    }
    // An absolute URI is allowed in place of a path.
    if let Some(rest) = target.strip_prefix("http://") {
        request.path = rest.find('/').map_or("/", |at| &rest[at..]);
    }
    let connection = request.header(&["Connection"]).map_or("", |(_, value)| value);
    let says = |word: &str| connection.split(',').any(|w| w.trim().eq_ignore_ascii_case(word));
    request.keep_alive = if minor_version == 0 { says("keep-alive") } else { !says("close") };
    Found::MmdsRequest(request, len)
}

/// The response to a request.
#[derive(Debug, PartialEq, Eq)]
pub struct MmdsAnswer {
    pub status: u16,
    pub json: bool,
    /// An additional header line.
    pub extra: Option<String>,
    pub body: String,
}

impl MmdsAnswer {
    pub fn text(status: u16, body: impl Into<String>) -> Self {
        Self { status, json: false, extra: None, body: body.into() }
    }

    /// Returns the bytes of the response.
    pub fn encode(&self, keep_alive: bool) -> Vec<u8> {
        let Self { status, body, .. } = self;
        let reason = match status {
            200 => "OK",
            400 => "Bad Request",
            401 => "Unauthorized",
            404 => "Not Found",
            405 => "Method Not Allowed",
            _ => "Not Implemented",
        };
        let kind = if self.json { "application/json" } else { "text/plain" };
        let connection = if keep_alive { "keep-alive" } else { "close" };
        let extra = self.extra.as_ref().map_or(String::new(), |line| format!("{line}\r\n"));
        let len = body.len();
        format!(
            "HTTP/1.1 {status} {reason}\r\nConnection: {connection}\r\nContent-Type: {kind}\r\n\
             Content-Length: {len}\r\n{extra}\r\n{body}"
        )
        .into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn request_is_read_up_to_its_end() {
        let bytes = b"GET //a HTTP/1.1\r\nX-Metadata-Token:  t \r\n\r\nGET /b";
        let Found::MmdsRequest(request, len) = read(bytes) else { panic!() };
        assert_eq!((request.method, request.path, len), ("GET", "//a", bytes.len() - 6));
        assert_eq!(request.header(&["other", "x-metadata-token"]), Some(("x-metadata-token", "t")));
        assert!(request.keeps_alive());
        assert_eq!(read(&bytes[..len - 1]), Found::Part);
        let Found::MmdsRequest(whole, _) = read(b"GET http://host HTTP/1.0\r\n\r\n") else {
            panic!()
        };
        assert_eq!((whole.path, whole.keeps_alive()), ("/", false));
    }

    #[test]
    fn body_and_garbage_are_refused() {
        for bytes in [
            &b"PUT / HTTP/1.1\r\nContent-Length: 1\r\n\r\n"[..],
            b"PUT / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01",
            b"GET / HTTP/2.0\r\n\r\n",
            b"GET / HTTP/1.1\r\nA: \xff\xfe\r\n\r\n",
        ] {
            assert!(matches!(read(bytes), Found::Bad(_)), "{bytes:?}");
        }
        let many = format!("GET / HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(HEADERS_MAX + 1));
        assert!(matches!(read(many.as_bytes()), Found::Bad(_)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_fault(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            read(&bytes);
        }
    }
}
