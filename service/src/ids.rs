//! Random identifiers and tokens, and the check of those that a client sends.
//!
//! An id from a client is checked before it becomes a key or a part of a path.

use std::fs::File;
use std::io::{self, Read};

/// The first characters of a token of this server.
pub const TOKEN_PREFIX: &str = "pvmm_";
const UUID_BYTES: usize = 16;
const UUID_LENGTH: usize = 36;
const TOKEN_BYTES: usize = 24;
const INSTANCE_BYTES: usize = 4;

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Draws random bytes and writes them in hexadecimal.
pub fn random_hex<const N: usize>() -> io::Result<String> {
    Ok(hex(&random::<N>()?))
}

/// Draws a random UUID, version 4.
pub fn new_id() -> io::Result<String> {
    let mut bytes = random::<UUID_BYTES>()?;
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let text = hex(&bytes);
    let parts = [&text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]];
    Ok(parts.join("-"))
}

/// Draws a new bearer token.
pub fn new_token() -> io::Result<String> {
    Ok(format!("{TOKEN_PREFIX}{}", random_hex::<TOKEN_BYTES>()?))
}

/// Returns whether the text has the form of an id of this server.
pub fn is_id(text: &str) -> bool {
    let dash = |at: usize| matches!(at, 8 | 13 | 18 | 23);
    text.len() == UUID_LENGTH
        && text.bytes().enumerate().all(|(at, byte)| {
            if dash(at) { byte == b'-' } else { matches!(byte, b'0'..=b'9' | b'a'..=b'f') }
        })
}

/// Returns whether the text can name a volume or a template: it is also a part of a path.
pub fn is_name(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=63).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(allowed)
}

/// The identity of one data directory. It is in the name of each VM that a server over that
/// directory made, so that servers over other directories leave the VM alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance(String);

impl Instance {
    /// Draws the identity of a new data directory.
    pub fn new() -> io::Result<Self> {
        Ok(Self(hex(&random::<INSTANCE_BYTES>()?)))
    }

    /// Takes up the identity that a data directory has.
    pub fn from_text(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// Returns the identity as text.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Returns the name of the VM of a sandbox.
    pub fn vm_name(&self, id: &str) -> String {
        format!("s{}-{id}", self.0)
    }

    /// Returns the sandbox that a VM was made for, by its name; `None` for a VM of someone else.
    pub fn sandbox_of<'a>(&self, vm_name: &'a str) -> Option<&'a str> {
        let rest = vm_name.strip_prefix('s')?.strip_prefix(&self.0[..])?;
        rest.strip_prefix('-').filter(|id| is_id(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_id_is_an_id_and_unique() {
        let (a, b) = (new_id().unwrap(), new_id().unwrap());
        assert!(is_id(&a) && is_id(&b) && a != b);
        let (ours, theirs) = (Instance::new().unwrap(), Instance::new().unwrap());
        assert_eq!(ours.sandbox_of(&ours.vm_name(&a)), Some(&a[..]));
        assert_eq!(theirs.sandbox_of(&ours.vm_name(&a)), None);
        assert_eq!(ours.sandbox_of("web"), None);
    }

    #[test]
    fn id_that_is_no_uuid_is_refused() {
        let good = new_id().unwrap();
        for bad in ["", "..", "a/b", &good[1..], &good.to_uppercase(), &good.replace('-', "0")] {
            assert!(!is_id(bad) || *bad == good, "{bad}");
        }
    }

    #[test]
    fn name_that_leaves_its_folder_is_refused() {
        assert!(is_name("work-1.2_x"));
        for bad in ["", ".", "..", ".x", "a/b", "a b", "é", &"x".repeat(64)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
