//! Signatures: the proof that a holder of a key has written a folder.
//!
//! Checksums detect damage; a writer who changes a snapshot on purpose corrects them. With a key a
//! folder has one more file, `signature`: a SHA-256 of each other file, and an HMAC-SHA256 of that
//! list. It proves who wrote the snapshot, not when: an old snapshot with this key is accepted too.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::{fmt, str};

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::SnapshotError;
use crate::sys;

/// The name of the signature file.
pub const SIGNATURE: &str = "signature";
/// The largest accepted size of the signature file.
pub const SIGNATURE_MAX: u64 = 64 << 10;
const HEAD: &str = "pvmm-signature 1";
/// Bytes of a file that are hashed, or skipped, at once.
const PIECE: u64 = 64 << 10;
const KEY_MIN: usize = 32;
const KEY_MAX: u64 = 4096;

/// A secret that the writer and the reader of a snapshot share.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Vec<u8>);

/// Does not print the bytes.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// Makes a key of 32 to 4096 bytes.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, SnapshotError> {
        let bytes = bytes.into();
        if (KEY_MIN..=KEY_MAX as usize).contains(&bytes.len()) {
            Ok(Self(bytes))
        } else {
            Err(SnapshotError::Key(format!("has {} bytes, not 32 to 4096", bytes.len())))
        }
    }

    /// Reads a key from a file, which only its owner may be able to read.
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

    /// Returns the text of a signature over files with these digests.
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

    /// Returns the digests in a signature, if it was made with this key.
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
        // The digest of the key fills a block exactly, so that this cannot fail.
        let digest = Sha256::digest(&self.0);
        let mut block = [0; 64];
        block.iter_mut().zip(digest).for_each(|(to, from)| *to = from);
        Hmac::<Sha256>::new(&block.into())
    }
}

/// Returns the digest of a file's first `size` bytes: of the size, and of each piece that is not
/// all zeros with its offset.
///
/// Most of guest memory is holes, which are neither read nor hashed. A hole that a copy has filled
/// with zeros does not change the digest.
pub fn digest(file: &File, size: u64) -> io::Result<[u8; 32]> {
    let mut hasher = Sha256::new_with_prefix(size.to_le_bytes());
    let mut buffer = vec![0; PIECE as usize];
    let mut at = 0;
    while let Some(data) = sys::next_data(file, at)?.filter(|data| *data < size) {
        at = data - data % PIECE;
        let end = sys::next_hole(file, data)?.unwrap_or(size).min(size);
        while at < end {
            let len = (size - at).min(PIECE);
            let bytes = buffer.get_mut(..len as usize).unwrap_or_default();
            file.read_exact_at(bytes, at)?;
            if bytes.iter().any(|byte| *byte != 0) {
                hasher.update(at.to_le_bytes());
                hasher.update(&*bytes);
            }
            at += len;
        }
    }
    if file.metadata()?.len() < size {
        Err(io::ErrorKind::UnexpectedEof.into())
    } else {
        Ok(hasher.finalize().into())
    }
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

    /// Holes do not count, and different contents have different digests.
    #[test]
    fn digest_is_of_what_a_file_holds_and_not_of_how_it_is_kept() {
        let place = tempfile::tempdir().unwrap();
        let size = 5 * PIECE + 7;
        let file = |name: &str, holes: bool, data: &[(u64, u8)]| {
            let path = place.path().join(name);
            fs::write(&path, if holes { vec![] } else { vec![0; size as usize] }).unwrap();
            let file = File::options().read(true).write(true).open(&path).unwrap();
            file.set_len(size).unwrap();
            data.iter().for_each(|(at, byte)| file.write_all_at(&[*byte], *at).unwrap());
            digest(&file, size).unwrap()
        };
        let data = [(PIECE, 1), (2 * PIECE - 1, 2), (5 * PIECE + 6, 3)];
        let kept = file("with-holes", true, &data);
        assert_eq!(kept, file("without", false, &data));
        assert_ne!(kept, file("moved", true, &[(0, 1), (PIECE - 1, 2), (5 * PIECE + 6, 3)]));
        assert_ne!(kept, file("less", true, &data[..2]));
        assert_ne!(file("empty", true, &[]), digest_bytes(&[]));
        let whole = File::open(place.path().join("without")).unwrap();
        assert_ne!(kept, digest(&whole, size - 7).unwrap());
        assert!(digest(&whole, size + 1).is_err());
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
