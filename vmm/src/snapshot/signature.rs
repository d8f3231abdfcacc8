//! Whether a folder is one that a holder of a key has written.
//!
//! Checksums find what broke; whoever changes a snapshot on purpose makes them right again. With a key a folder has one
//! more file, `signature`: a SHA-256 of each other file, and an HMAC-SHA256 of that list. It says who wrote the
//! snapshot, not when: an old one with the same key is as good.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::{fmt, str};

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::SnapshotError;

/// The file in a folder that is written with a key.
pub const SIGNATURE: &str = "signature";
/// The most that is read of it.
pub const SIGNATURE_MAX: u64 = 64 << 10;
const HEAD: &str = "pvmm-signature 1";
const KEY_MIN: usize = 32;
const KEY_MAX: u64 = 4096;

/// A secret that writer and reader of a snapshot share.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Vec<u8>);

/// Without its bytes.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// A key of 32 to 4096 bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, SnapshotError> {
        let bytes = bytes.into();
        match (KEY_MIN..=KEY_MAX as usize).contains(&bytes.len()) {
            true => Ok(Self(bytes)),
            false => Err(SnapshotError::Key(format!("has {} bytes, not 32 to 4096", bytes.len()))),
        }
    }

    /// All bytes of a file, which only its owner may read.
    pub fn read(path: &Path) -> Result<Self, SnapshotError> {
        let refuse = |why: &str| SnapshotError::Key(format!("{}: {why}", path.display()));
        let failed = |error: io::Error| refuse(&error.to_string());
        let mut options = fs::OpenOptions::new();
        let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
        let facts = file.metadata().map_err(failed)?;
        if !facts.is_file() {
            return Err(refuse("is not a regular file"));
        }
        if facts.mode() & 0o077 != 0 {
            return Err(refuse("can be read or written by others; chmod 600 it"));
        }
        let mut bytes = Vec::new();
        file.take(KEY_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
        Self::new(bytes)
    }

    /// The text of a signature over files of which each has this digest.
    pub fn sign(&self, files: &[(String, [u8; 32])]) -> String {
        let mut text = format!("{HEAD}\n");
        for (name, digest) in files {
            text.push_str(&format!("{} {name}\n", hex(digest)));
        }
        let mut mac = self.mac();
        mac.update(text.as_bytes());
        let sum = hex(&mac.finalize().into_bytes());
        text.push_str(&format!("hmac {sum}\n"));
        text
    }

    /// The digests that a signature gives, if it was made with this key.
    pub fn verify(&self, text: &[u8]) -> Result<Vec<(String, [u8; 32])>, SnapshotError> {
        let wrong = || SnapshotError::Signature("was not made with this key".into());
        let text = str::from_utf8(text).map_err(|_| wrong())?;
        let (list, sum) = text.rsplit_once("hmac ").ok_or_else(wrong)?;
        let sum = sum.strip_suffix('\n').and_then(bytes).ok_or_else(wrong)?;
        let mut mac = self.mac();
        mac.update(list.as_bytes());
        mac.verify_slice(&sum).map_err(|_| wrong())?;
        let mut lines = list.lines();
        if lines.next() != Some(HEAD) {
            return Err(SnapshotError::Signature("is of a later version".into()));
        }
        let entry = |line: &str| {
            let (digest, name) = line.split_once(' ')?;
            Some((name.to_owned(), bytes(digest)?))
        };
        lines.map(entry).collect::<Option<_>>().ok_or_else(wrong)
    }

    fn mac(&self) -> Hmac<Sha256> {
        // A digest of the key is as long as a block takes, so that this cannot fail.
        let digest = Sha256::digest(&self.0);
        let mut block = [0; 64];
        block.iter_mut().zip(digest).for_each(|(to, from)| *to = from);
        Hmac::<Sha256>::new(&block.into())
    }
}

/// The digest of a file's first `size` bytes.
pub fn digest(file: &File, size: u64) -> io::Result<[u8; 32]> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < size {
        let len = (size - at).min(buffer.len() as u64) as usize;
        let bytes = buffer.get_mut(..len).unwrap_or_default();
        file.read_exact_at(bytes, at)?;
        hasher.update(bytes);
        at += len as u64;
    }
    Ok(hasher.finalize().into())
}

pub fn digest_bytes(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Option<[u8; 32]> {
    let plain = hex.len() == 64 && hex.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
    let mut bytes = [0; 32];
    for (index, byte) in bytes.iter_mut().enumerate().filter(|_| plain) {
        *byte = u8::from_str_radix(hex.get(index * 2..index * 2 + 2)?, 16).ok()?;
    }
    plain.then_some(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn key(byte: u8) -> Key {
        Key::new([byte; 32]).unwrap()
    }

    #[test]
    fn h10_signature_of_another_key_or_changed_anywhere_is_refused() {
        let files = [("manifest.json".to_owned(), [7; 32]), ("memory.bin".to_owned(), [8; 32])];
        let text = key(1).sign(&files);
        assert_eq!(key(1).verify(text.as_bytes()).unwrap(), files);
        assert!(key(2).verify(text.as_bytes()).is_err());
        for index in 0..text.len() {
            let mut flipped = text.clone().into_bytes();
            flipped[index] ^= 1;
            assert!(key(1).verify(&flipped).is_err(), "flipped at {index}");
            assert!(key(1).verify(&text.as_bytes()[..index]).is_err(), "cut at {index}");
        }
    }

    #[test]
    fn digest_of_a_file_is_that_of_its_bytes() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("file");
        fs::write(&path, vec![3; (1 << 20) + 5]).unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(digest(&file, (1 << 20) + 5).unwrap(), digest_bytes(&vec![3; (1 << 20) + 5]));
        assert!(digest(&file, (1 << 20) + 6).is_err());
    }

    #[test]
    fn key_that_is_short_or_that_others_read_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("key");
        assert!(Key::read(&path).is_err());
        fs::write(&path, [1; 31]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(Key::read(&path).unwrap_err().to_string().contains("31 bytes"));
        fs::write(&path, [1; 32]).unwrap();
        assert_eq!(Key::read(&path).unwrap(), key(1));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(Key::read(&path).unwrap_err().to_string().contains("chmod 600"));
        assert!(Key::read(place.path()).is_err());
    }
}
