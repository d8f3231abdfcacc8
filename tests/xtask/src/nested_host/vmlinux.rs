//! Extracts the kernel from a bzImage.
//!
//! The CPU of the nested host is emulated and would need seconds to decompress the kernel. QEMU
//! boots the ELF file through its PVH entry.

use std::io::Read;

/// The maximum size of a kernel; a larger stream is damaged.
const LARGEST: u64 = 256 << 20;

/// Returns the ELF file in `image`, if it is a bzImage with a payload in zstd.
pub fn extract(image: &[u8]) -> Option<Vec<u8>> {
    // Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length.
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let start = (usize::from(*image.get(0x1f1)?) + 1) * 512 + word(image, 0x248)?;
    let payload = image.get(start..start.checked_add(word(image, 0x24c)?)?)?;
    let decoder = ruzstd::decoding::StreamingDecoder::new(payload).ok()?;
    let mut elf = Vec::new();
    decoder.take(LARGEST).read_to_end(&mut elf).ok()?;
    elf.starts_with(b"\x7fELF").then_some(elf)
}

fn word(image: &[u8], at: usize) -> Option<usize> {
    let bytes = image.get(at..)?.first_chunk()?;
    usize::try_from(u32::from_le_bytes(*bytes)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extract_from_anything_else_is_none() {
        assert_eq!(extract(b"not a kernel"), None);
        let mut image = vec![0; 4096];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x250].fill(0xff);
        assert_eq!(extract(&image), None);
    }
}
