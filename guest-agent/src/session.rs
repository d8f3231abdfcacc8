//! Records: the events of an interpreter session, on the output channel of a `RunCode` stream.
//!
//! A driver writes them, the agent forwards them, a client reads them; the agent and the client do
//! not trust them.
//!
//! A record is its length (u32, little-endian, of all that follows), its kind (one byte) and its
//! body. Frames may cut records anywhere.

/// Longest record, without its length field.
pub const MAX_RECORD: usize = 16 << 20;
/// Bytes of a record's length and kind.
pub const RECORD_HEAD: usize = 5;

/// Flag in the kind of a driver's record: the driver waits for an acknowledgement.
pub const ACK: u8 = 0x80;
/// The byte that acknowledges a record.
pub const TAKEN: u8 = 6;

/// The kind of a record's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordKind {
    /// Bytes of standard output.
    Stdout,
    /// Bytes of standard error.
    Stderr,
    /// Parts: something the code displayed, by MIME type.
    Display,
    /// Parts: the value of the last expression, by MIME type.
    Result,
    /// Parts: `name`, `value` and `traceback` of an exception.
    Error,
    /// Driver to agent: the code has ended.
    Done,
    /// Driver to agent: code may be sent. Parts: `version`.
    Ready,
}

impl RecordKind {
    pub fn byte(self) -> u8 {
        match self {
            Self::Stdout => 1,
            Self::Stderr => 2,
            Self::Display => 3,
            Self::Result => 4,
            Self::Error => 5,
            Self::Done => 6,
            Self::Ready => 7,
        }
    }

    pub fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Stdout,
            2 => Self::Stderr,
            3 => Self::Display,
            4 => Self::Result,
            5 => Self::Error,
            6 => Self::Done,
            7 => Self::Ready,
            _ => return None,
        })
    }
}

/// Decodes a record's head, and returns the length of its body and its kind.
pub fn record_head(head: [u8; RECORD_HEAD]) -> Option<(usize, RecordKind)> {
    let [a, b, c, d, kind] = head;
    let len = u32::from_le_bytes([a, b, c, d]) as usize;
    if len == 0 || len > MAX_RECORD {
        return None;
    }
    Some((len - 1, RecordKind::from_byte(kind)?))
}

/// Encodes a record's head; the body must have at most `MAX_RECORD - 1` bytes.
pub fn head_of(kind: RecordKind, body: usize) -> [u8; RECORD_HEAD] {
    let [a, b, c, d] = (body as u32 + 1).to_le_bytes();
    [a, b, c, d, kind.byte()]
}

/// Most parts of one record.
const MAX_PARTS: usize = 64;

/// Decodes parts: each a key (u16 length, UTF-8) and a value (u32 length), one after another.
pub fn parts(mut body: &[u8]) -> Option<Vec<(String, Vec<u8>)>> {
    let mut parts = Vec::new();
    while !body.is_empty() {
        let (len, rest) = body.split_first_chunk()?;
        let (key, rest) = rest.split_at_checked(u16::from_le_bytes(*len) as usize)?;
        let (len, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        if parts.len() == MAX_PARTS {
            return None;
        }
        parts.push((String::from_utf8(key.to_vec()).ok()?, value.to_vec()));
        body = rest;
    }
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn head_of_a_record_is_read_back() {
        for kind in (1..=7).map(|byte| RecordKind::from_byte(byte).unwrap()) {
            assert_eq!(record_head(head_of(kind, 300)), Some((300, kind)));
        }
    }

    #[test]
    fn head_that_is_empty_too_long_or_unknown_is_refused() {
        for head in [[0, 0, 0, 0, 1], [1, 0, 0, 1, 1], [255; 5], [1, 0, 0, 0, 0], [1, 0, 0, 0, 8]] {
            assert_eq!(record_head(head), None, "{head:?}");
        }
    }

    #[test]
    fn parts_are_read_and_whatever_is_cut_is_refused() {
        let whole = b"\x01\0a\x02\0\0\0xy\x02\0bc\0\0\0\0";
        let expected = vec![("a".into(), b"xy".to_vec()), ("bc".into(), vec![])];
        assert_eq!(parts(whole), Some(expected));
        for end in (1..whole.len()).filter(|end| *end != 9) {
            assert_eq!(parts(&whole[..end]), None, "{end}");
        }
        assert_eq!(parts(b"\x01\0\xff\0\0\0\0"), None);
        assert_eq!(parts(&b"\0\0\0\0\0\0".repeat(65)), None);
    }
}
