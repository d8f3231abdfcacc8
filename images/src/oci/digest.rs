//! Digests of an image's parts, and streams that must have one.

use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::cache;

/// A SHA-256 digest, written as `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Digest(String);

impl Digest {
    /// Returns the digest of bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(cache::hex(&Sha256::digest(bytes)))
    }

    /// Returns the digits.
    pub fn hex(&self) -> &str {
        &self.0
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        match text.strip_prefix("sha256:") {
            Some(hex) if hex.len() == 64 && hex.bytes().all(is_digit) => Ok(Self(hex.to_owned())),
            _ => Err(format!("{:?} is no SHA-256 digest", shortened(text))),
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.0)
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}

/// A stream that fails at its end if its bytes do not have the digest.
pub struct Checked<'a, R> {
    inner: R,
    hash: Sha256,
    expected: &'a Digest,
}

impl<'a, R: Read> Checked<'a, R> {
    pub fn new(inner: R, expected: &'a Digest) -> Self {
        Self { inner, hash: Sha256::new(), expected }
    }
}

impl<R: Read> Read for Checked<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hash.update(&buffer[..count]);
        if count == 0 && !buffer.is_empty() {
            let found = cache::hex(&self.hash.clone().finalize());
            if found != self.expected.0 {
                let text =
                    format!("{} has other bytes: their digest is sha256:{found}", self.expected);
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_is_of_one_kind_and_length() {
        let right = Digest::of(b"x").to_string();
        assert_eq!(right.parse::<Digest>().unwrap().to_string(), right);
        for wrong in
            ["", "sha256:", "sha512:00", &right.to_uppercase(), &format!("{right}0"), "sha256:../x"]
        {
            assert!(wrong.parse::<Digest>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn stream_with_other_bytes_fails_at_its_end() {
        let digest = Digest::of(b"some bytes");
        let read = |bytes: &[u8]| io::read_to_string(Checked::new(bytes, &digest));
        assert_eq!(read(b"some bytes").unwrap(), "some bytes");
        assert!(read(b"some byte").unwrap_err().to_string().contains("other bytes"));
    }
}
