//! The part of ELF that is needed to recognize a kernel or a module.
//!
//! Parsed by hand, because only a name and a section are needed.

use std::fs::File;
use std::os::unix::fs::FileExt;

const EM_X86_64: u16 = 62;
/// The largest section table or name table; no kernel has larger ones.
const TABLE_CAP: u64 = 16 << 20;
/// How far to search: the banner is early in the read-only data, because `init/` is linked first.
const BANNER_SEARCH_CAP: u64 = 32 << 20;
const BANNER: &[u8] = b"Linux version ";

/// Whether `head` starts a 64-bit little-endian x86-64 ELF file of any type.
pub(super) fn is_x86_64(head: &[u8]) -> bool {
    head.len() >= 64 && head.starts_with(b"\x7fELF\x02\x01") && u16_at(head, 18) == EM_X86_64
}

/// Returns the release in the kernel's banner, as `uname -r` prints it.
pub(super) fn kernel_release(file: &File) -> Option<String> {
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).ok()?;
    let (table_at, size, count, names) = section_table(&header)?;
    let mut table = vec![0; size * count];
    file.read_exact_at(&mut table, table_at).ok()?;
    let section = |n: usize| table.get(n * size..(n + 1) * size).map(section_header);
    let (_, names_at, names_len) = section(names)?;
    let mut strings = vec![0; usize::try_from(names_len.min(TABLE_CAP)).ok()?];
    file.read_exact_at(&mut strings, names_at).ok()?;
    let (_, at, len) = (0..count).filter_map(section).find(|&(name, _, _)| {
        strings.get(name..).is_some_and(|text| text.starts_with(b".rodata\0"))
    })?;
    find_banner(file, at, len.min(BANNER_SEARCH_CAP))
}

/// Searches block by block, because the banner is usually in the first.
fn find_banner(file: &File, at: u64, len: u64) -> Option<String> {
    const BLOCK: u64 = 256 * 1024;
    /// Blocks overlap by this much, so that a banner across a border is found.
    const OVERLAP: u64 = 256;
    let mut done = 0;
    while done < len {
        let mut block = vec![0; usize::try_from((len - done).min(BLOCK + OVERLAP)).ok()?];
        file.read_exact_at(&mut block, at + done).ok()?;
        let found = block.windows(BANNER.len()).position(|window| window == BANNER);
        if let Some(start) = found.map(|found| found + BANNER.len()) {
            let release = block[start..].split(|&byte| byte == b' ' || byte == 0).next()?;
            return String::from_utf8(release.to_vec()).ok();
        }
        done += BLOCK;
    }
    None
}

/// Returns the content of one section of a complete ELF file.
pub(super) fn section<'a>(file: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    let (table_at, size, count, names) = section_table(file.get(..64)?)?;
    let table_at = usize::try_from(table_at).ok()?;
    let table = file.get(table_at..table_at.checked_add(size * count)?)?;
    let content = |n: usize| {
        let (name, at, len) = section_header(table.get(n * size..(n + 1) * size)?);
        let at = usize::try_from(at).ok()?;
        Some((name, file.get(at..at.checked_add(usize::try_from(len).ok()?)?)?))
    };
    let (_, strings) = content(names)?;
    (0..count).filter_map(content).find_map(|(name, bytes)| {
        let text = strings.get(name..)?.split(|&byte| byte == 0).next()?;
        (text == wanted).then_some(bytes)
    })
}

/// Returns (offset, entry size, entry count, index of the name section), validated.
fn section_table(header: &[u8]) -> Option<(u64, usize, usize, usize)> {
    if !is_x86_64(header) {
        return None;
    }
    let (size, count) = (usize::from(u16_at(header, 58)), usize::from(u16_at(header, 60)));
    let names = usize::from(u16_at(header, 62));
    (size >= 64 && names < count).then_some((u64_at(header, 40), size, count, names))
}

/// Returns (offset of the name, offset, length).
fn section_header(header: &[u8]) -> (usize, u64, u64) {
    (u32_at(header, 0) as usize, u64_at(header, 24), u64_at(header, 32))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
