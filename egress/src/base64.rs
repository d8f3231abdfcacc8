//! Base64 (RFC 4648), for the one header that hides its value in it.

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Encodes bytes, with padding.
pub fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for part in bytes.chunks(3) {
        let byte = |at: usize| u32::from(part.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let value = (bits >> (18 - 6 * digit)) & 63;
            let padded = digit > part.len();
            text.push(if padded { '=' } else { DIGITS[value as usize].into() });
        }
    }
    text
}

/// Decodes text with padding. Returns nothing if it is not in the one form that `encode` has.
pub fn decode(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for part in text.chunks(4) {
        let (mut bits, mut digits) = (0_u32, 0);
        for letter in part.iter().take_while(|letter| **letter != b'=') {
            let value = DIGITS.iter().position(|digit| digit == letter)?;
            bits = bits << 6 | value as u32;
            digits += 1;
        }
        bits <<= 6 * (4 - digits);
        bytes.extend_from_slice(bits.to_be_bytes().get(1..digits.max(1))?);
    }
    (encode(&bytes).as_bytes() == text).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_every_length_come_back() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v")] {
            assert_eq!(encode(bytes.as_bytes()), text);
            assert_eq!(decode(text.as_bytes()).unwrap(), bytes.as_bytes());
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(encode(&all).as_bytes()).unwrap(), all);
    }

    #[test]
    fn text_in_another_form_is_no_base64() {
        for text in ["Z", "Zg", "Zg=", "Zh==", "Zg==Zg==", "Z===", "====", "Zm 9", "Zm9v\n"] {
            assert_eq!(decode(text.as_bytes()), None, "{text}");
        }
    }
}
