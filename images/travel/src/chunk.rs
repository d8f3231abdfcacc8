//! Chunks: pieces of one mebibyte, named by the SHA-256 of their content.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};
use ruzstd::decoding::FrameDecoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use sha2::{Digest as _, Sha256};

/// The size of every chunk but the last of a file.
pub const CHUNK: u64 = 1 << 20;
/// The largest object of a chunk: an incompressible one, its frame and its seal.
pub const MAX_OBJECT: u64 = CHUNK + (64 << 10);
/// The largest window that a compressed chunk may ask for, which bounds the memory of a decoder.
const MAX_WINDOW: u64 = 8 << 20;

/// The SHA-256 of a chunk or of a manifest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads 64 lower-case hexadecimal digits.
    pub fn parse(hex: &str) -> Option<Self> {
        let plain = hex.len() == 64 && hex.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
        let mut bytes = [0; 32];
        for (index, byte) in bytes.iter_mut().enumerate().filter(|_| plain) {
            *byte = u8::from_str_radix(hex.get(index * 2..index * 2 + 2)?, 16).ok()?;
        }
        plain.then_some(Self(bytes))
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.hex())
    }
}

/// Returns how many chunks a file of `size` bytes has.
pub fn count(size: u64) -> u64 {
    size.div_ceil(CHUNK)
}

/// Returns the length of chunk `index` of a file of `size` bytes.
pub fn len(size: u64, index: u64) -> usize {
    size.saturating_sub(index.saturating_mul(CHUNK)).min(CHUNK) as usize
}

/// Returns whether a chunk is all zeros; such a chunk is a hole and is in no store.
pub fn is_zero(bytes: &[u8]) -> bool {
    let (parts, rest) = bytes.as_chunks::<64>();
    parts.iter().all(|part| *part == [0; 64]) && rest.iter().all(|byte| *byte == 0)
}

/// Compresses a chunk into one zstd frame.
pub fn pack(bytes: &[u8]) -> Vec<u8> {
    let packed = compress_to_vec(bytes, CompressionLevel::Fastest);
    if packed.len() < bytes.len() && unpack(&packed, bytes.len()).as_deref() == Some(bytes) {
        return packed;
    }
    compress_to_vec(bytes, CompressionLevel::Uncompressed)
}

/// Returns the content of a frame, if it has exactly `len` bytes.
pub fn unpack(frame: &[u8], len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut decoder = FrameDecoder::new();
    decoder.set_max_window_size(MAX_WINDOW);
    let count = decoder.decode_all(frame, &mut bytes).ok()?;
    (count == len).then_some(bytes)
}

/// Reads a chunk of a file; `None` if it lies in a hole.
pub fn read(file: &File, size: u64, index: u64) -> io::Result<Option<Vec<u8>>> {
    let (start, len) = (index * CHUNK, len(size, index));
    match seek(file, SeekFrom::Data(start)) {
        Ok(data) if data >= start + len as u64 => return Ok(None),
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        // A file system that knows no holes has none.
        _ => {}
    }
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, start)?;
    Ok(Some(bytes).filter(|bytes| !is_zero(bytes)))
}
