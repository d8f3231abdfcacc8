//! The name that a client shows in its first bytes: SNI of a TLS hello, or Host of an HTTP request.
//!
//! The file is pure and reads hostile bytes. A message that two readers could understand
//! differently (two names, two Host lines) shows no name.

use crate::policy::normal_name;

/// The most bytes that a client may send before its name is known.
pub const HELLO_MAX: usize = 32 << 10;
const HEADERS_MAX: usize = 100;
const METHOD_MAX: usize = 20;

const RECORD_HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const EXTENSION_SNI: u16 = 0;
const EXTENSION_ECH: u16 = 0xfe0d;
/// The draft versions of the extension that hides the name.
const EXTENSION_ESNI: u16 = 0xffce;

/// The first bytes of a client, read as far as possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hello {
    /// More bytes are needed.
    Partial,
    Tls {
        name: Option<String>,
        encrypted: bool,
    },
    Http {
        name: Option<String>,
    },
    /// Neither TLS nor HTTP.
    Other,
}

/// Reads the first bytes of a client.
pub fn read(bytes: &[u8]) -> Hello {
    match bytes.first() {
        None => Hello::Partial,
        Some(&RECORD_HANDSHAKE) => read_tls(bytes),
        Some(b'A'..=b'Z') => read_http(bytes),
        Some(_) => Hello::Other,
    }
}

fn read_tls(bytes: &[u8]) -> Hello {
    match bytes {
        [_] => return Hello::Partial,
        [_, 3, ..] => {}
        _ => return Hello::Other,
    }
    let nameless = Hello::Tls { name: None, encrypted: false };
    match gather_hello(bytes) {
        Gathered::Partial => Hello::Partial,
        Gathered::Malformed => nameless,
        Gathered::Whole(hello) => read_client_hello(&hello).unwrap_or(nameless),
    }
}

enum Gathered {
    Partial,
    Malformed,
    Whole(Vec<u8>),
}

/// Collects the body of the ClientHello, which may be spread over several records (RFC 8446 section
/// 5.1).
fn gather_hello(mut bytes: &[u8]) -> Gathered {
    let mut message = Vec::new();
    loop {
        if let [kind, high, middle, low, body @ ..] = &message[..] {
            let len = usize::from(*high) << 16 | usize::from(*middle) << 8 | usize::from(*low);
            if *kind != CLIENT_HELLO || len > HELLO_MAX {
                return Gathered::Malformed;
            }
            if let Some(body) = body.get(..len) {
                return Gathered::Whole(body.to_vec());
            }
        }
        let Some((header, rest)) = bytes.split_first_chunk::<5>() else {
            return Gathered::Partial;
        };
        let [kind, major, _, high, low] = *header;
        let len = usize::from(u16::from_be_bytes([high, low]));
        if kind != RECORD_HANDSHAKE || major != 3 || len == 0 || len > 1 << 14 {
            return Gathered::Malformed;
        }
        // A part of a record counts too: the kind of message is in its first byte.
        let here = rest.len().min(len);
        message.extend_from_slice(&rest[..here]);
        bytes = &rest[here..];
    }
}

/// Reads the body of a ClientHello (RFC 8446 section 4.1.2). Returns None if it is malformed.
fn read_client_hello(body: &[u8]) -> Option<Hello> {
    let mut reader = Reader(body);
    // Version and random.
    reader.take(34)?;
    let session = reader.take_u8()?;
    reader.take(session.into())?;
    let suites = reader.take_u16()?;
    reader.take(suites.into())?;
    let compressions = reader.take_u8()?;
    reader.take(compressions.into())?;
    if reader.0.is_empty() {
        return Some(Hello::Tls { name: None, encrypted: false });
    }
    let extensions = reader.take_u16()?;
    let mut extensions = Reader(reader.take(extensions.into())?);
    let (mut server_names, mut encrypted) = (Vec::new(), false);
    while !extensions.0.is_empty() {
        let kind = extensions.take_u16()?;
        let len = extensions.take_u16()?;
        let content = extensions.take(len.into())?;
        match kind {
            EXTENSION_SNI => server_names.push(read_server_name(content)),
            EXTENSION_ECH | EXTENSION_ESNI => encrypted = true,
            _ => {}
        }
    }
    let name = match &mut server_names[..] {
        [name] => name.take(),
        _ => None,
    };
    Some(Hello::Tls { name, encrypted })
}

/// Reads a list of exactly one host name (RFC 6066 section 3).
fn read_server_name(content: &[u8]) -> Option<String> {
    let mut list = Reader(content);
    let len = list.take_u16()?;
    let mut entries = Reader(list.take(len.into())?);
    let kind = entries.take_u8()?;
    let len = entries.take_u16()?;
    let name = entries.take(len.into())?;
    if kind != 0 || !entries.0.is_empty() || !list.0.is_empty() {
        return None;
    }
    normal_name(std::str::from_utf8(name).ok()?)
}

fn read_http(bytes: &[u8]) -> Hello {
    let method = bytes.iter().take_while(|byte| byte.is_ascii_uppercase()).count();
    match bytes.get(method) {
        _ if method > METHOD_MAX => return Hello::Other,
        None => return Hello::Partial,
        Some(b' ') => {}
        Some(_) => return Hello::Other,
    }
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Complete(_)) => {}
        Ok(httparse::Status::Partial) => return Hello::Partial,
        // A request that is one, except for more headers than fit, shows no name.
        Err(httparse::Error::TooManyHeaders) => return Hello::Http { name: None },
        Err(_) => return Hello::Other,
    }
    let mut hosts = request.headers.iter().filter(|line| line.name.eq_ignore_ascii_case("host"));
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => std::str::from_utf8(host.value).ok().and_then(host_name),
        _ => None,
    };
    // The authority in a request line comes before Host (RFC 9112 section 3.2.2); they must agree.
    let target = request.path.unwrap_or_default();
    let authority = match target.split_once("://") {
        Some((_, rest)) if !target.starts_with('/') => {
            Some(rest.split(['/', '?']).next().unwrap_or_default())
        }
        _ if request.method == Some("CONNECT") => Some(target),
        _ => None,
    };
    let name = match authority {
        Some(authority) if host_name(authority) != host => None,
        _ => host,
    };
    Hello::Http { name }
}

/// Returns the name of an authority without its port.
fn host_name(authority: &str) -> Option<String> {
    let (name, port) = authority.trim().split_once(':').unwrap_or((authority.trim(), ""));
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    normal_name(name)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn take_u8(&mut self) -> Option<u8> {
        self.take(1).and_then(|bytes| bytes.first().copied())
    }

    fn take_u16(&mut self) -> Option<u16> {
        let bytes = self.take(2)?.first_chunk::<2>()?;
        Some(u16::from_be_bytes(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extension(kind: u16, content: &[u8]) -> Vec<u8> {
        let len = content.len() as u16;
        [&kind.to_be_bytes()[..], &len.to_be_bytes(), content].concat()
    }

    fn sni(name: &str) -> Vec<u8> {
        let entry = [&[0][..], &(name.len() as u16).to_be_bytes(), name.as_bytes()].concat();
        extension(EXTENSION_SNI, &[&(entry.len() as u16).to_be_bytes()[..], &entry].concat())
    }

    fn hello(extensions: &[Vec<u8>]) -> Vec<u8> {
        let extensions = extensions.concat();
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0, 0, 2, 0x13, 1, 1, 0]);
        body.extend((extensions.len() as u16).to_be_bytes());
        body.extend(extensions);
        [&[1, 0][..], &(body.len() as u16).to_be_bytes(), &body].concat()
    }

    fn records(message: &[u8], size: usize) -> Vec<u8> {
        let record =
            |part: &[u8]| [&[22, 3, 1][..], &(part.len() as u16).to_be_bytes(), part].concat();
        message.chunks(size).flat_map(record).collect()
    }

    fn tls(name: Option<&str>, encrypted: bool) -> Hello {
        Hello::Tls { name: name.map(str::to_owned), encrypted }
    }

    #[test]
    fn tls_hello_shows_its_name_however_it_is_cut() {
        let message = hello(&[extension(43, &[2, 3, 4]), sni("Api.Example.com")]);
        for size in [1, 3, 50, 4000] {
            let bytes = records(&message, size);
            for end in 0..bytes.len() {
                assert_eq!(read(&bytes[..end]), Hello::Partial, "{end} of {}", bytes.len());
            }
            assert_eq!(read(&bytes), tls(Some("api.example.com"), false));
        }
    }

    #[test]
    fn tls_hello_without_one_clear_name_shows_none() {
        for extensions in [
            vec![],
            vec![sni("1.2.3.4")],
            vec![sni("a.example"), sni("b.example")],
            vec![sni("a\0.example")],
            vec![extension(0, &[])],
            vec![extension(0, &[0, 4, 1, 0, 1, b'a'])],
        ] {
            assert_eq!(read(&records(&hello(&extensions), 4000)), tls(None, false));
        }
    }

    #[test]
    fn tls_hello_with_an_encrypted_part_says_so() {
        let bytes = records(&hello(&[sni("a.example"), extension(EXTENSION_ECH, &[0])]), 4000);
        assert_eq!(read(&bytes), tls(Some("a.example"), true));
    }

    #[test]
    fn tls_hello_with_changed_bytes_is_read_without_panic() {
        let bytes = records(&hello(&[sni("api.example.com"), extension(43, &[2, 3, 4])]), 40);
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = bytes.clone();
                changed[at] = value;
                read(&changed);
            }
        }
    }

    #[test]
    fn http_request_shows_its_host() {
        let http = |text: &str| read(text.as_bytes());
        let named = |name: &str| Hello::Http { name: Some(name.to_owned()) };
        let text = "GET / HTTP/1.1\r\nUser-Agent: x\r\nhost: Example.com:8080\r\n\r\n";
        assert_eq!(http(text), named("example.com"));
        for end in 0..text.len() {
            assert_eq!(http(&text[..end]), Hello::Partial);
        }
        let absolute = "GET http://example.com/x HTTP/1.1\r\nHost: example.com\r\n\r\n";
        assert_eq!(http(absolute), named("example.com"));
    }

    #[test]
    fn http_request_without_one_clear_host_shows_none() {
        for text in [
            "GET / HTTP/1.0\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a.example\r\nHost: b.example\r\n\r\n",
            "GET http://b.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
            "CONNECT b.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a.example@b.example\r\n\r\n",
        ] {
            assert_eq!(read(text.as_bytes()), Hello::Http { name: None }, "{text}");
        }
    }

    #[test]
    fn other_protocols_are_neither() {
        for bytes in [&b"SSH-2.0-x\r\n"[..], b"PING\r\n", b"EHLO a\r\n", &[0, 0, 0, 8], b"\x16\x02"]
        {
            assert_eq!(read(bytes), Hello::Other, "{bytes:?}");
        }
    }
}
