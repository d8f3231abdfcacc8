//! Encryption and authentication with a key that the store does not have.
//!
//! Without a key an object is named by the digest of its content. With one the name is an HMAC of
//! that digest, so that a store cannot tell which known files it holds, and every object is sealed
//! with AES-256-GCM under its own name: one object in the place of another is refused.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use crate::chunk::Digest;
use crate::error::TravelError;

const KEY_MIN: usize = 32;
const KEY_MAX: u64 = 4096;

/// The way in which objects are named and written.
#[derive(Default)]
pub struct Seal(Option<Keys>);

struct Keys {
    names: hmac::Key,
    content: LessSafeKey,
    random: SystemRandom,
}

impl Seal {
    /// Reads a key of 32 to 4096 bytes from a file that only its owner may read.
    pub fn read(path: &Path) -> Result<Self, TravelError> {
        let refused =
            |why: &str| TravelError::KeyFile { path: path.to_owned(), why: why.to_owned() };
        // A pipe must not block.
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = file.map_err(|error| refused(&error.to_string()))?;
        let facts = file.metadata().map_err(|error| refused(&error.to_string()))?;
        if !facts.is_file() {
            return Err(refused("is not a regular file"));
        }
        if facts.mode() & 0o077 != 0 {
            return Err(refused("can be read or written by others; chmod 600 it"));
        }
        let mut bytes = Vec::new();
        let read = file.take(KEY_MAX + 1).read_to_end(&mut bytes);
        read.map_err(|error| refused(&error.to_string()))?;
        Self::of(&bytes).ok_or_else(|| refused("has not 32 to 4096 bytes"))
    }

    /// Makes the keys for names and for content from the bytes of a key.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        (KEY_MIN..=KEY_MAX as usize).contains(&bytes.len()).then_some(())?;
        let root = hmac::Key::new(hmac::HMAC_SHA256, bytes);
        let names = hmac::sign(&root, b"pvmm-travel names");
        let content = hmac::sign(&root, b"pvmm-travel content");
        let content = UnboundKey::new(&AES_256_GCM, content.as_ref()).ok()?;
        Some(Self(Some(Keys {
            names: hmac::Key::new(hmac::HMAC_SHA256, names.as_ref()),
            content: LessSafeKey::new(content),
            random: SystemRandom::new(),
        })))
    }

    /// Returns the name of an object with this content.
    pub fn object(&self, digest: &Digest) -> String {
        match &self.0 {
            None => digest.hex(),
            Some(keys) => {
                let mut name = [0; 32];
                name.copy_from_slice(hmac::sign(&keys.names, &digest.0).as_ref());
                Digest(name).hex()
            }
        }
    }

    /// Returns the bytes to be stored under `name`.
    pub fn close(&self, name: &str, mut bytes: Vec<u8>) -> Result<Vec<u8>, TravelError> {
        let Some(keys) = &self.0 else { return Ok(bytes) };
        let failed = |_| TravelError::Key { what: name.to_owned() };
        let mut nonce = [0; NONCE_LEN];
        keys.random.fill(&mut nonce).map_err(failed)?;
        let aad = Aad::from(name.as_bytes());
        let unique = Nonce::assume_unique_for_key(nonce);
        keys.content.seal_in_place_append_tag(unique, aad, &mut bytes).map_err(failed)?;
        bytes.splice(0..0, nonce);
        Ok(bytes)
    }

    /// Returns what was stored under `name`, if it was stored there with this key.
    pub fn open(&self, name: &str, mut bytes: Vec<u8>) -> Result<Vec<u8>, TravelError> {
        let Some(keys) = &self.0 else { return Ok(bytes) };
        let failed = || TravelError::Key { what: name.to_owned() };
        let nonce = bytes.first_chunk::<NONCE_LEN>().copied().ok_or_else(failed)?;
        let aad = Aad::from(name.as_bytes());
        let opened = keys.content.open_within(
            Nonce::assume_unique_for_key(nonce),
            aad,
            &mut bytes,
            NONCE_LEN..,
        );
        let len = opened.map_err(|_| failed())?.len();
        bytes.truncate(len);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_is_opened_only_under_its_name_with_its_key_and_unchanged() {
        let (one, other) = (Seal::of(&[1; 32]).unwrap(), Seal::of(&[2; 32]).unwrap());
        let sealed = one.close("a", b"text".to_vec()).unwrap();
        assert_eq!(one.open("a", sealed.clone()).unwrap(), b"text");
        assert!(one.open("b", sealed.clone()).is_err());
        assert!(other.open("a", sealed.clone()).is_err());
        for index in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[index] ^= 1;
            assert!(one.open("a", changed).is_err(), "{index}");
            assert!(one.open("a", sealed[..index].to_vec()).is_err(), "{index}");
        }
        let digest = Digest::of(b"text");
        assert_ne!(one.object(&digest), other.object(&digest));
        assert_eq!(Seal::default().object(&digest), digest.hex());
    }
}
