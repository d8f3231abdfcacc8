//! The requests of a guest to a host with secrets: strictly read HTTP/1.1, with placeholders in
//! header values replaced.
//!
//! The file is pure and reads hostile bytes. A request that two readers could understand
//! differently is refused, because a value must reach no other host than its own: not by another
//! Host, nor by a request that is hidden in another's body. Bodies pass as they are.

use std::rc::Rc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;

use crate::policy::normal_name;
use crate::secrets::Secret;

/// The longest request line and headers, before and after values are put in.
pub const HEAD_MAX: usize = 64 << 10;
const REWRITTEN_MAX: usize = 128 << 10;
const CHUNK_LINE_MAX: usize = 20;
const TRAILERS_MAX: usize = 8 << 10;

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal(pub &'static str);

/// The place in the stream of requests.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Head,
    /// In a body of known length, with this many bytes left.
    Body(u64),
    ChunkLine,
    ChunkData(u64),
    /// The line end after a chunk's data, with this many of its bytes left.
    ChunkEnd(u8),
    Trailers,
    /// After a request for another protocol: bytes pass, and nothing is replaced any more.
    Other,
}

/// The requests of one connection.
#[derive(Debug)]
pub struct Requests {
    host: String,
    port: u16,
    secrets: Vec<Rc<Secret>>,
    place: Place,
    /// A head, chunk line or trailers of which the end has not arrived.
    held: Vec<u8>,
}

/// The body that follows a head.
enum Body {
    Len(u64),
    Chunked,
    /// The request asks for another protocol.
    Other,
}

impl Requests {
    pub fn new(host: String, port: u16, secrets: Vec<Rc<Secret>>) -> Self {
        Self { host, port, secrets, place: Place::Head, held: Vec::new() }
    }

    /// Reads bytes of the guest and appends what the server is to get.
    pub fn push(&mut self, mut input: &[u8], output: &mut Vec<u8>) -> Result<(), Refusal> {
        while !input.is_empty() {
            match self.place {
                Place::Head => {
                    let Some(head) = self.gather(&mut input, b"\r\n\r\n", HEAD_MAX)? else { break };
                    self.place = match self.rewrite(&head, output)? {
                        Body::Len(0) => Place::Head,
                        Body::Len(len) => Place::Body(len),
                        Body::Chunked => Place::ChunkLine,
                        Body::Other => Place::Other,
                    };
                }
                Place::Body(left) => {
                    let left = pass(&mut input, left, output);
                    self.place = if left == 0 { Place::Head } else { Place::Body(left) };
                }
                Place::ChunkLine => {
                    let Some(line) = self.gather(&mut input, b"\r\n", CHUNK_LINE_MAX)? else {
                        break;
                    };
                    self.place = match chunk_len(&line)? {
                        0 => Place::Trailers,
                        len => Place::ChunkData(len),
                    };
                    output.extend(line);
                }
                Place::ChunkData(left) => {
                    let left = pass(&mut input, left, output);
                    self.place =
                        if left == 0 { Place::ChunkEnd(2) } else { Place::ChunkData(left) };
                }
                Place::ChunkEnd(left) => {
                    let wanted = if left == 2 { b'\r' } else { b'\n' };
                    if input[0] != wanted {
                        return Err(Refusal("a chunk is longer than it says"));
                    }
                    output.push(wanted);
                    input = &input[1..];
                    self.place = if left == 2 { Place::ChunkEnd(1) } else { Place::ChunkLine };
                }
                Place::Trailers => {
                    let Some(line) = self.gather(&mut input, b"\r\n", TRAILERS_MAX)? else { break };
                    match &line[..line.len() - 2] {
                        [] => self.place = Place::Head,
                        line => drop(split_header(line)?),
                    }
                    output.extend(line);
                }
                Place::Other => {
                    output.extend(std::mem::take(&mut input));
                }
            }
        }
        Ok(())
    }

    /// Collects bytes up to and with `end`. Returns nothing if the end has not arrived.
    fn gather(
        &mut self,
        input: &mut &[u8],
        end: &[u8],
        max: usize,
    ) -> Result<Option<Vec<u8>>, Refusal> {
        for (at, byte) in input.iter().enumerate() {
            if *byte == b'\n' && self.held.last() != Some(&b'\r') {
                return Err(Refusal("a line ends without CR"));
            }
            self.held.push(*byte);
            if self.held.len() > max {
                return Err(Refusal("the headers or a line of the request are too long"));
            }
            if *byte == b'\n' && self.held.ends_with(end) {
                *input = &input[at + 1..];
                return Ok(Some(std::mem::take(&mut self.held)));
            }
        }
        *input = &[];
        Ok(None)
    }

    /// Judges a head and appends it with values in place of placeholders.
    fn rewrite(&self, head: &[u8], output: &mut Vec<u8>) -> Result<Body, Refusal> {
        let lines = head.strip_suffix(b"\r\n\r\n").unwrap_or(head);
        let mut lines = lines.split_inclusive(|byte| *byte == b'\n').map(without_end);
        let is_1_1 = check_request_line(lines.next().unwrap_or_default())?;
        let (mut hosts, mut lens, mut codings, mut other) = (0, Vec::new(), 0, false);
        let mut used = vec![false; self.secrets.len()];
        let mut headers = Vec::with_capacity(head.len());
        for line in lines {
            let (name, value) = split_header(line)?;
            let plain_name = name.to_ascii_lowercase();
            let is_framing =
                matches!(plain_name.as_slice(), b"host" | b"content-length" | b"transfer-encoding");
            match plain_name.as_slice() {
                // Some servers read these as the headers that they look like.
                b"content_length" | b"transfer_encoding" => {
                    return Err(Refusal("a header of the body's length has an underscore"));
                }
                _ if !is_framing => other |= plain_name == b"upgrade",
                b"host" if !self.is_host(value) => {
                    return Err(Refusal("Host is not the host of the connection"));
                }
                b"host" => hosts += 1,
                b"content-length" => lens.push(body_len(value)?),
                b"transfer-encoding" if value.eq_ignore_ascii_case(b"chunked") => codings += 1,
                _ => return Err(Refusal("Transfer-Encoding is not chunked")),
            }
            headers.extend_from_slice(name);
            headers.extend_from_slice(b": ");
            if is_framing {
                headers.extend_from_slice(value);
            } else {
                headers.extend(self.put_values(&plain_name, value, &mut used));
            }
            headers.extend_from_slice(b"\r\n");
            if headers.len() > REWRITTEN_MAX {
                return Err(Refusal("the headers are too long with the values in them"));
            }
        }
        if hosts != 1 {
            return Err(Refusal("the request has no Host, or several"));
        }
        let body = match (lens.as_slice(), codings) {
            ([], 0) => Body::Len(0),
            ([len], 0) => Body::Len(*len),
            ([], 1) if is_1_1 => Body::Chunked,
            _ => return Err(Refusal("the length of the body is said in several ways")),
        };
        for (secret, _) in self.secrets.iter().zip(used).filter(|(_, used)| *used) {
            secret.uses.set(secret.uses.get() + 1);
        }
        let line_len = head.iter().position(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        output.extend_from_slice(&head[..line_len]);
        output.append(&mut headers);
        output.extend_from_slice(b"\r\n");
        Ok(if other { Body::Other } else { body })
    }

    /// Returns whether a Host names the host of this connection, with or without its port.
    fn is_host(&self, value: &[u8]) -> bool {
        let Ok(text) = std::str::from_utf8(value) else { return false };
        let (name, port) = match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, None),
        };
        normal_name(name).is_some_and(|name| name == self.host)
            && port.is_none_or(|port| *port == self.port.to_string())
    }

    /// Returns a header's value with the values of secrets in place of their placeholders.
    fn put_values(&self, name: &[u8], value: &[u8], used: &mut [bool]) -> Vec<u8> {
        // Basic authentication hides the placeholder in base64 (RFC 7617).
        if name == b"authorization"
            && let Some((scheme, encoded)) = value.split_at_checked(6)
            && scheme.eq_ignore_ascii_case(b"basic ")
            && let Ok(decoded) = BASE64.decode(encoded.trim_ascii())
        {
            let put = self.put_plain(&decoded, used);
            if put != decoded {
                return [scheme, BASE64.encode(&put).as_bytes()].concat();
            }
        }
        self.put_plain(value, used)
    }

    fn put_plain(&self, value: &[u8], used: &mut [bool]) -> Vec<u8> {
        let mut value = value.to_vec();
        for (secret, used) in self.secrets.iter().zip(used) {
            let placeholder = secret.placeholder.as_bytes();
            let mut put = Vec::with_capacity(value.len());
            let mut rest = value.as_slice();
            while let Some(at) = find(rest, placeholder) {
                put.extend_from_slice(&rest[..at]);
                put.extend_from_slice(secret.value.as_str().as_bytes());
                rest = &rest[at + placeholder.len()..];
                *used = true;
                if put.len() > REWRITTEN_MAX {
                    // Refused by the caller.
                    return put;
                }
            }
            put.extend_from_slice(rest);
            value = put;
        }
        value
    }
}

fn find(bytes: &[u8], part: &[u8]) -> Option<usize> {
    bytes.windows(part.len()).position(|window| window == part)
}

/// Moves up to `left` bytes and returns how many are left then.
fn pass(input: &mut &[u8], left: u64, output: &mut Vec<u8>) -> u64 {
    let here = usize::try_from(left).map_or(input.len(), |left| left.min(input.len()));
    output.extend_from_slice(&input[..here]);
    *input = &input[here..];
    left - here as u64
}

fn without_end(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r\n").unwrap_or(line)
}

/// Checks a request line. Returns whether the request is of HTTP/1.1.
fn check_request_line(line: &[u8]) -> Result<bool, Refusal> {
    let mut words = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Refusal("the request line has not three words"));
    };
    if method.is_empty() || !method.iter().all(|byte| is_token(*byte)) {
        return Err(Refusal("the method is not a word"));
    }
    // TRACE sends the headers back; CONNECT and a target with a host lead elsewhere.
    if method.eq_ignore_ascii_case(b"trace") || method.eq_ignore_ascii_case(b"connect") {
        return Err(Refusal("TRACE and CONNECT are not for hosts with secrets"));
    }
    let plain = target.iter().all(|byte| (b'!'..=b'~').contains(byte));
    if !plain || !(target.starts_with(b"/") || target == b"*") {
        return Err(Refusal("the target is not a path"));
    }
    match version {
        b"HTTP/1.1" => Ok(true),
        b"HTTP/1.0" => Ok(false),
        _ => Err(Refusal("the version is not HTTP/1.1")),
    }
}

/// Splits a header into its name and its value without the space around it.
fn split_header(line: &[u8]) -> Result<(&[u8], &[u8]), Refusal> {
    let colon = line.iter().position(|byte| *byte == b':');
    let (name, value) = match colon {
        Some(at) => (&line[..at], &line[at + 1..]),
        None => return Err(Refusal("a header has no colon")),
    };
    // This refuses folded lines too, which begin with a space (RFC 9112 section 5.2).
    if name.is_empty() || !name.iter().all(|byte| is_token(*byte)) {
        return Err(Refusal("the name of a header is not a word"));
    }
    let is_value = |byte: &u8| matches!(byte, b'\t' | b' '..=b'~' | 0x80..);
    if !value.iter().all(is_value) {
        return Err(Refusal("a header has a control character"));
    }
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = value.iter().position(|byte| !is_space(byte)).unwrap_or(value.len());
    let end = value.iter().rposition(|byte| !is_space(byte)).map_or(start, |at| at + 1);
    Ok((name, &value[start..end]))
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

fn body_len(value: &[u8]) -> Result<u64, Refusal> {
    let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    let len = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
    len.filter(|_| digits).ok_or(Refusal("Content-Length is not a number"))
}

/// Reads the line before a chunk. Extensions, which no client needs, are refused.
fn chunk_len(line: &[u8]) -> Result<u64, Refusal> {
    let digits = without_end(line);
    let good = (1..=15).contains(&digits.len()) && digits.iter().all(u8::is_ascii_hexdigit);
    let len = std::str::from_utf8(digits).ok().and_then(|text| u64::from_str_radix(text, 16).ok());
    len.filter(|_| good).ok_or(Refusal("the length of a chunk is not a number"))
}

#[cfg(test)]
mod tests;
