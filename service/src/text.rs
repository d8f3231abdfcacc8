//! Output of a guest as text: whole characters, and JSON that every client reads alike.
//!
//! Bytes of the guest are untrusted and may be cut anywhere; clients expect text.

use serde_json::Value;

/// Converts chunks of bytes to text. A character that two chunks share waits for the second.
#[derive(Default)]
pub struct Utf8Chunks {
    rest: Vec<u8>,
}

impl Utf8Chunks {
    /// Takes a chunk and returns the text that is complete. Invalid bytes become U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.rest.extend_from_slice(bytes);
        let keep = incomplete(&self.rest);
        let ready = self.rest.len() - keep;
        let text = String::from_utf8_lossy(&self.rest[..ready]).into_owned();
        self.rest.drain(..ready);
        text
    }

    /// Returns what was left at the end.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.rest)).into_owned()
    }
}

/// Returns the number of last bytes that may be the start of a character.
fn incomplete(bytes: &[u8]) -> usize {
    for back in 1..=bytes.len().min(3) {
        let byte = bytes[bytes.len() - back];
        let length = match byte {
            0x00..=0x7f => return 0,
            0x80..=0xbf => continue,
            0xc0..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xff => 4,
        };
        return if length > back { back } else { 0 };
    }
    0
}

/// Writes JSON in ASCII: some clients also end a line at U+0085, U+2028 and U+2029.
pub fn ascii_json(value: &Value) -> String {
    let json = value.to_string();
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() {
            text.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            text.push_str(&format!("\\u{unit:04x}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn character_cut_in_two_arrives_whole() {
        let text = "aé€😀z";
        for cut in 0..text.len() {
            let mut chunks = Utf8Chunks::default();
            let mut out = chunks.push(&text.as_bytes()[..cut]);
            out += &chunks.push(&text.as_bytes()[cut..]);
            out += &chunks.finish();
            assert_eq!(out, text, "cut at {cut}");
        }
    }

    #[test]
    fn invalid_bytes_become_replacement_characters() {
        let mut chunks = Utf8Chunks::default();
        assert_eq!(chunks.push(b"a\xffb"), "a\u{fffd}b");
        assert_eq!(chunks.push(b"\xe2\x82"), "");
        assert_eq!(chunks.finish(), "\u{fffd}");
    }

    #[test]
    fn ascii_json_round_trips() {
        let value = serde_json::json!({ "chunk": "é\u{2028}😀\n\u{85}" });
        let text = ascii_json(&value);
        assert!(text.is_ascii());
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
