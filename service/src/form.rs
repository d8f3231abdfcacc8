//! Forms as clients send them: `application/x-www-form-urlencoded` and `multipart/form-data`.
//!
//! A multipart body is taken in pieces of any size and never held in memory as a whole.

use std::collections::VecDeque;

use crate::error::ApiError;

/// The longest head of a part.
const MAX_HEAD: usize = 16 << 10;
/// The longest boundary; the standard allows 70 characters.
const MAX_BOUNDARY: usize = 200;

/// An event of a multipart body.
#[derive(Debug, PartialEq, Eq)]
pub enum FormEvent {
    /// A part begins.
    Part {
        /// The name of the field.
        name: String,
        /// The name of the file, if the part is one.
        file: Option<String>,
    },
    /// Bytes of the part.
    Data(Vec<u8>),
    /// The part is complete.
    End,
}

/// The encoding of a form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Pairs in one line.
    Urlencoded,
    /// Parts between lines with this boundary.
    Multipart(String),
}

impl Encoding {
    /// Reads the encoding from a `Content-Type`.
    pub fn of(content_type: &str) -> Option<Self> {
        let (kind, rest) = content_type.split_once(';').unwrap_or((content_type, ""));
        match kind.trim().to_ascii_lowercase().as_str() {
            "application/x-www-form-urlencoded" => Some(Self::Urlencoded),
            "multipart/form-data" => {
                let boundary = parameters(rest).into_iter().find(|(key, _)| key == "boundary")?.1;
                let fits = (1..=MAX_BOUNDARY).contains(&boundary.len());
                fits.then_some(Self::Multipart(boundary))
            }
            _ => None,
        }
    }
}

/// Decodes the pairs of an urlencoded form.
pub fn urlencoded(text: &[u8]) -> Result<Vec<(String, String)>, ApiError> {
    let decode = |bytes: &[u8]| {
        let mut decoded = Vec::with_capacity(bytes.len());
        let mut rest = bytes;
        while let Some((byte, after)) = rest.split_first() {
            rest = after;
            match (byte, after) {
                (b'+', _) => decoded.push(b' '),
                (b'%', [high, low, after @ ..]) => {
                    let digit = |byte: &u8| char::from(*byte).to_digit(16);
                    let (high, low) = digit(high).zip(digit(low)).ok_or_else(bad)?;
                    decoded.push((high * 16 + low) as u8);
                    rest = after;
                }
                (b'%', _) => return Err(bad()),
                (byte, _) => decoded.push(*byte),
            }
        }
        String::from_utf8(decoded).map_err(|_| bad())
    };
    let mut pairs = Vec::new();
    for pair in text.split(|byte| *byte == b'&').filter(|pair| !pair.is_empty()) {
        let mut parts = pair.splitn(2, |byte| *byte == b'=');
        let name = decode(parts.next().unwrap_or_default())?;
        pairs.push((name, decode(parts.next().unwrap_or_default())?));
    }
    Ok(pairs)
}

fn bad() -> ApiError {
    ApiError::bad_request("the body is not a form as its type says")
}

enum State {
    /// Before the first boundary, or in the data of a part.
    Data {
        in_part: bool,
    },
    /// After a boundary.
    Boundary,
    Head,
    Over,
}

/// Takes a multipart body apart.
pub struct Multipart {
    /// The line break and boundary that end a part.
    delimiter: Vec<u8>,
    buffer: Vec<u8>,
    state: State,
    events: VecDeque<FormEvent>,
}

impl Multipart {
    /// Begins a body with this boundary.
    pub fn new(boundary: &str) -> Self {
        let delimiter = format!("\r\n--{boundary}").into_bytes();
        // The first boundary has no line break before it.
        let (buffer, state) = (b"\r\n".to_vec(), State::Data { in_part: false });
        Self { delimiter, buffer, state, events: VecDeque::new() }
    }

    /// Returns the next event of the bytes so far.
    pub fn next_event(&mut self) -> Option<FormEvent> {
        self.events.pop_front()
    }

    /// Returns whether the last boundary was seen.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), ApiError> {
        self.buffer.extend_from_slice(bytes);
        while self.advance()? {}
        Ok(())
    }

    /// Does one step; returns false if more bytes are needed.
    fn advance(&mut self) -> Result<bool, ApiError> {
        match self.state {
            State::Over => {
                self.buffer.clear();
                Ok(false)
            }
            State::Data { in_part } => {
                if let Some(at) = find(&self.buffer, &self.delimiter) {
                    let rest = self.buffer.split_off(at + self.delimiter.len());
                    let mut data = std::mem::replace(&mut self.buffer, rest);
                    data.truncate(at);
                    if in_part {
                        self.data(data);
                        self.events.push_back(FormEvent::End);
                    }
                    self.state = State::Boundary;
                    return Ok(true);
                }
                // The end may be the beginning of a boundary.
                let safe = self.buffer.len().saturating_sub(self.delimiter.len() - 1);
                let rest = self.buffer.split_off(safe);
                let data = std::mem::replace(&mut self.buffer, rest);
                if in_part {
                    self.data(data);
                }
                Ok(false)
            }
            State::Boundary => match self.buffer.get(..2) {
                None => Ok(false),
                Some(b"--") => {
                    self.state = State::Over;
                    Ok(true)
                }
                Some(b"\r\n") => {
                    // The line break stays, so that an empty head ends like any other.
                    self.state = State::Head;
                    Ok(true)
                }
                Some(_) => Err(bad()),
            },
            State::Head => {
                let Some(at) = find(&self.buffer, b"\r\n\r\n") else {
                    return if self.buffer.len() > MAX_HEAD { Err(bad()) } else { Ok(false) };
                };
                let rest = self.buffer.split_off(at + 4);
                let head = std::mem::replace(&mut self.buffer, rest);
                self.events.push_back(part(&String::from_utf8_lossy(&head))?);
                self.state = State::Data { in_part: true };
                Ok(true)
            }
        }
    }

    fn data(&mut self, data: Vec<u8>) {
        if !data.is_empty() {
            self.events.push_back(FormEvent::Data(data));
        }
    }
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    let first = *wanted.first()?;
    let mut from = 0;
    while let Some(at) = text.get(from..)?.iter().position(|byte| *byte == first) {
        if text[from + at..].starts_with(wanted) {
            return Some(from + at);
        }
        from += at + 1;
    }
    None
}

fn part(head: &str) -> Result<FormEvent, ApiError> {
    let disposition = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    });
    let (_, rest) = disposition.and_then(|value| value.split_once(';')).ok_or_else(bad)?;
    let parameters = parameters(rest);
    let value = |wanted: &str| {
        let found = parameters.iter().find(|(key, _)| key == wanted)?;
        // Clients write these three in one of two ways.
        Some(found.1.replace("%22", "\"").replace("%0D", "\r").replace("%0A", "\n"))
    };
    let file = value("filename").or_else(|| value("filename*"));
    Ok(FormEvent::Part { name: value("name").ok_or_else(bad)?, file })
}

/// Reads `key=value; key="value"`.
fn parameters(text: &str) -> Vec<(String, String)> {
    let (mut parameters, mut rest) = (Vec::new(), text);
    while let Some((key, after)) = rest.split_once('=') {
        let key = key.trim_start_matches([';', ' ', '\t']).trim().to_ascii_lowercase();
        let mut value = String::new();
        if let Some(quoted) = after.trim_start().strip_prefix('"') {
            let mut chars = quoted.char_indices();
            rest = "";
            while let Some((at, char)) = chars.next() {
                match char {
                    '"' => {
                        rest = &quoted[at + 1..];
                        break;
                    }
                    '\\' => value.extend(chars.next().map(|(_, char)| char)),
                    char => value.push(char),
                }
            }
        } else {
            let (plain, after) = after.split_once(';').unwrap_or((after, ""));
            plain.trim().clone_into(&mut value);
            rest = after;
        }
        parameters.push((key, value));
    }
    parameters
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &str = "--b\r\nContent-Disposition: form-data; name=\"name\"\r\n\r\napp\r\n\
        --b\r\ncontent-disposition: form-data; name=\"src/a.py\"; filename=\"a.py\"\r\n\
        Content-Type: text/plain\r\n\r\nline\r\n--other\r\n-\r\n--b\r\n\
        Content-Disposition: form-data; name=empty; filename=\"\"\r\n\r\n\r\n--b--\r\n";

    /// Reads a body in pieces of `size` bytes.
    fn read(body: &str, size: usize) -> Result<Vec<(String, bool, String)>, ApiError> {
        let mut form = Multipart::new("b");
        let mut parts: Vec<(String, bool, String)> = Vec::new();
        let mut open = false;
        for piece in body.as_bytes().chunks(size) {
            form.push(piece)?;
            while let Some(event) = form.next_event() {
                match event {
                    FormEvent::Part { name, file } => {
                        parts.push((name, file.is_some(), String::new()));
                        open = true;
                    }
                    FormEvent::Data(data) => {
                        parts.last_mut().unwrap().2 += &String::from_utf8_lossy(&data);
                    }
                    FormEvent::End => open = false,
                }
            }
        }
        assert!(form.is_over() && !open);
        Ok(parts)
    }

    #[test]
    fn multipart_body_in_pieces_of_any_size_gives_its_parts() {
        for size in [1, 2, 3, 7, 64, BODY.len()] {
            let parts = read(BODY, size).unwrap();
            let part = |name: &str, file, text: &str| (name.to_owned(), file, text.to_owned());
            assert_eq!(
                parts,
                [
                    part("name", false, "app"),
                    part("src/a.py", true, "line\r\n--other\r\n-"),
                    part("empty", true, ""),
                ],
                "{size}"
            );
        }
    }

    #[test]
    fn multipart_body_without_names_or_ends_is_refused() {
        assert!(read("--b\r\nX: y\r\n\r\nz\r\n--b--", 64).is_err());
        assert!(read("--bx\r\n", 64).is_err());
        let long = format!("--b\r\n{}", "x".repeat(MAX_HEAD + 9));
        assert!(read(&long, 64).is_err());
        let mut cut = Multipart::new("b");
        cut.push(&BODY.as_bytes()[..BODY.len() - 4]).unwrap();
        assert!(!cut.is_over());
    }

    #[test]
    fn encoding_is_read_from_the_type() {
        let boundary = |text: &str| Some(Encoding::Multipart(text.to_owned()));
        assert_eq!(Encoding::of("multipart/form-data; boundary=a-b"), boundary("a-b"));
        assert_eq!(Encoding::of("Multipart/Form-Data;boundary=\"a b\"; x=y"), boundary("a b"));
        assert_eq!(Encoding::of("multipart/form-data"), None);
        let plain = "application/x-www-form-urlencoded; charset=utf-8";
        assert_eq!(Encoding::of(plain), Some(Encoding::Urlencoded));
        assert_eq!(Encoding::of("application/json"), None);
    }

    #[test]
    fn urlencoded_pairs_are_decoded() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let pairs = urlencoded(b"name=a&dockerfile=FROM+base%0ARUN+x%3D1&empty&").unwrap();
        assert_eq!(pairs[1], pair("dockerfile", "FROM base\nRUN x=1"));
        assert_eq!((pairs.len(), &pairs[2]), (3, &pair("empty", "")));
        for bad in [&b"a=%"[..], b"a=%4", b"a=%zz", b"a=%ff"] {
            assert!(urlencoded(bad).is_err());
        }
    }
}
