//! Extracts the compressed vmlinux from a bzImage.
//!
//! Done once on the host, because an ELF kernel boots without decompressing itself each time.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

use lzma_rust2::XzReader;
use ruzstd::decoding::StreamingDecoder;

/// The largest kernel; it stops a crafted file from filling memory.
const VMLINUX_CAP: u64 = 1 << 30;
/// `HdrS`, in the setup header at 0x202 (Documentation/arch/x86/boot.rst).
const SETUP_MAGIC: &[u8] = b"HdrS";
/// The first boot protocol version with the payload's offset.
const PAYLOAD_PROTOCOL: u16 = 0x0208;
const SECTOR: usize = 512;

#[derive(Debug, thiserror::Error)]
pub enum BzImageError {
    #[error("the file is not a bzImage")]
    NotABzImage,
    #[error("the bzImage's boot protocol {version:#06x} is older than 2.08 (Linux 2.6.26)")]
    TooOld { version: u16 },
    #[error("the bzImage is cut short: copy or build it again")]
    Truncated,
    #[error("the bzImage is compressed with {method}, of which only zstd, xz and gzip are known")]
    UnknownCompression { method: &'static str },
    #[error("cannot decompress the bzImage")]
    Decompress { source: io::Error },
    #[error("the bzImage holds no x86-64 ELF kernel")]
    NotElf,
}

/// The setup header fields that are used.
#[derive(Debug)]
pub(super) struct Setup {
    version_at: u64,
    payload_at: usize,
    payload_len: usize,
}

impl Setup {
    /// Parses `head`, the start of the file, at least 0x250 bytes.
    pub(super) fn parse(head: &[u8]) -> Result<Setup, BzImageError> {
        if head.get(0x202..0x206) != Some(SETUP_MAGIC) || head.len() < 0x250 {
            return Err(BzImageError::NotABzImage);
        }
        let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let word = |at: usize| usize::from(half(at)) | usize::from(half(at + 2)) << 16;
        let version = half(0x206);
        if version < PAYLOAD_PROTOCOL {
            return Err(BzImageError::TooOld { version });
        }
        // Zero means four, for compatibility with very old loaders.
        let sectors = if head[0x1f1] == 0 { 4 } else { usize::from(head[0x1f1]) };
        Ok(Setup {
            version_at: u64::from(half(0x20e)) + SECTOR as u64,
            payload_at: (sectors + 1) * SECTOR + word(0x248),
            payload_len: word(0x24c),
        })
    }

    /// Reads `uname -r` from the version string that the header points to.
    pub(super) fn release(&self, file: &File) -> Option<String> {
        let mut text = [0; 128];
        let n = file.read_at(&mut text, self.version_at).ok()?;
        let release = text[..n].split(|&byte| byte == b' ' || byte == 0).next()?;
        String::from_utf8(release.to_vec()).ok()
    }
}

/// Returns the vmlinux inside a complete bzImage.
pub(super) fn unpack(image: &[u8]) -> Result<Vec<u8>, BzImageError> {
    let setup = Setup::parse(image)?;
    let end = setup.payload_at.checked_add(setup.payload_len).ok_or(BzImageError::Truncated)?;
    let payload = image.get(setup.payload_at..end).ok_or(BzImageError::Truncated)?;
    let failed = |source| BzImageError::Decompress { source };
    let stream: Box<dyn Read + '_> = match payload {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            Box::new(StreamingDecoder::new(payload).map_err(|err| failed(io::Error::other(err)))?)
        }
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Box::new(XzReader::new(payload, false)),
        [0x1f, 0x8b, ..] => Box::new(flate2::read::GzDecoder::new(payload)),
        [0x02, 0x21, 0x4c, 0x18, ..] => return Err(unknown("lz4")),
        [b'B', b'Z', b'h', ..] => return Err(unknown("bzip2")),
        [0x5d, 0, 0, ..] => return Err(unknown("lzma")),
        [0x89, b'L', b'Z', b'O', ..] => return Err(unknown("lzo")),
        _ => return Err(unknown("an unknown method")),
    };
    let mut vmlinux = Vec::new();
    stream.take(VMLINUX_CAP).read_to_end(&mut vmlinux).map_err(failed)?;
    if super::elf::is_x86_64(&vmlinux) { Ok(vmlinux) } else { Err(BzImageError::NotElf) }
}

fn unknown(method: &'static str) -> BzImageError {
    BzImageError::UnknownCompression { method }
}
