//! Kernel images: an ELF or a bzImage with parts of its headers changed, cut or made up.
//!
//! Whatever the file says, it is loaded within the guest's memory or refused.

use std::cell::OnceCell;
use std::io::{Seek as _, SeekFrom, Write as _};

use pvmm::testing::KernelTrial;
use tempfile::NamedTempFile;

use crate::input::Input;

/// The most that an image of this target has.
const IMAGE_MAX: usize = 8192;

pub fn image(bytes: &[u8]) {
    // One memory and one file for all inputs: what is tried is the headers.
    thread_local! {
        static PLACE: OnceCell<(KernelTrial, NamedTempFile)> = const { OnceCell::new() };
    }
    let mut input = Input::new(bytes);
    let mut image = match input.below(4) {
        0 => elf(),
        1 | 2 => bzimage(),
        _ => Vec::new(),
    };
    while !input.is_empty() {
        let at = usize::from(input.u16()) % (image.len() + 1);
        match input.below(8) {
            0 => image.truncate(at),
            1 if image.len() < IMAGE_MAX => image.extend(input.bytes::<16>()),
            2 => put(&mut image, at, &input.number().to_le_bytes()),
            _ => {
                // Fields of headers are near the start.
                let width = 1 << input.below(4);
                put(&mut image, at % 1024, &input.number().to_le_bytes()[..width]);
            }
        }
    }
    PLACE.with(|place| {
        let (trial, file) =
            place.get_or_init(|| (KernelTrial::new().unwrap(), NamedTempFile::new().unwrap()));
        let mut content = file.as_file();
        content.set_len(0).unwrap();
        content.seek(SeekFrom::Start(0)).unwrap();
        content.write_all(&image).unwrap();
        let _ = trial.load(file.path());
    });
}

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    let room = image.len().saturating_sub(at).min(bytes.len());
    if let Some(place) = image.get_mut(at..at + room) {
        place.copy_from_slice(&bytes[..room]);
    }
}

/// A kernel of one loaded segment, and a note that says where PVH enters it.
fn elf() -> Vec<u8> {
    let mut image = vec![0; 512];
    put(&mut image, 0, b"\x7fELF\x02\x01");
    put(&mut image, 24, &0x10_0000u64.to_le_bytes());
    put(&mut image, 32, &64u64.to_le_bytes());
    put(&mut image, 54, &56u16.to_le_bytes());
    put(&mut image, 56, &2u16.to_le_bytes());
    for (header, kind, offset, size) in [(64, 1u32, 256u64, 128u64), (120, 4, 384, 20)] {
        put(&mut image, header, &kind.to_le_bytes());
        put(&mut image, header + 8, &offset.to_le_bytes());
        put(&mut image, header + 24, &0x10_0000u64.to_le_bytes());
        put(&mut image, header + 32, &size.to_le_bytes());
        put(&mut image, header + 40, &size.to_le_bytes());
        put(&mut image, header + 48, &4u64.to_le_bytes());
    }
    // Name of 4 bytes, content of 4, the type of a PVH entry.
    for (at, word) in [(384, 4u32), (388, 4), (392, 18), (400, 0x10_0000)] {
        put(&mut image, at, &word.to_le_bytes());
    }
    put(&mut image, 396, b"Xen\0");
    image
}

/// A kernel that unpacks itself: one sector of set-up, then a page of code.
fn bzimage() -> Vec<u8> {
    let mut image = vec![0; 1024 + 4096];
    put(&mut image, 0x1f1, &[1]);
    put(&mut image, 0x1fe, &0xaa55u16.to_le_bytes());
    put(&mut image, 0x202, b"HdrS");
    put(&mut image, 0x206, &0x020fu16.to_le_bytes());
    put(&mut image, 0x211, &[1]);
    put(&mut image, 0x214, &0x10_0000u32.to_le_bytes());
    put(&mut image, 0x236, &3u16.to_le_bytes());
    put(&mut image, 0x258, &0x10_0000u64.to_le_bytes());
    put(&mut image, 0x260, &0x1_0000u32.to_le_bytes());
    image
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_that_changes_start_from_are_kernels() {
        let trial = KernelTrial::new().unwrap();
        for image in [elf(), bzimage()] {
            let mut file = NamedTempFile::new().unwrap();
            file.write_all(&image).unwrap();
            trial.load(file.path()).unwrap();
        }
    }
}
