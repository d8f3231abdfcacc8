//! Sparse files: copies their data and punches holes, so that empty ranges stay empty.
//!
//! Disks and memory images are mostly holes. A copy that filled them would take space for data that
//! was never written.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};

use crate::sys::{self, Clear};

/// Bytes copied at a time where the kernel cannot copy by itself.
const BUFFER: usize = 256 << 10;
/// The unit in which zeros are detected.
const BLOCK: usize = 4096;

/// Makes a range of a file a hole.
pub fn punch(file: &File, range: Range<u64>) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    retry(|| sys::fallocate(file.as_fd(), Clear::Punch, range.start, range.end - range.start))
}

/// Returns the parts of `range` in which `file` has data, in order, or the whole range where that
/// is unknown.
pub fn data(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    Ok(known_data(file, range.clone())?.unwrap_or_else(|| Vec::from([range])))
}

/// Returns the blocks of `size` bytes in which `file` has any data within `range`, in order, or the
/// whole range where that is unknown.
pub fn blocks_with_data(file: &File, range: Range<u64>, size: u64) -> io::Result<Vec<Range<u64>>> {
    if !sys::knows_holes(file.as_fd())? {
        return Ok(Vec::from([range]));
    }
    let mut blocks = Vec::new();
    let mut at = range.start;
    while at < range.end {
        match sys::seek_data(file.as_fd(), at)? {
            Some(data) if data < range.end => {
                let block = data / size * size;
                blocks.push(block..block + size);
                at = block + size;
            }
            _ => break,
        }
    }
    Ok(blocks)
}

/// Copies the data in `range` to the equal range of another file, leaving out zeros.
pub fn copy(from: &File, to: &File, range: Range<u64>) -> io::Result<()> {
    let Some(parts) = known_data(from, range.clone())? else {
        // The kernel would copy holes as zeros that take space.
        return copy_by_hand(from, to, range);
    };
    for part in parts {
        let done = sys::copy_range(from.as_fd(), to.as_fd(), part.clone())?;
        if done < part.end {
            copy_by_hand(from, to, done..part.end)?;
        }
    }
    Ok(())
}

/// Returns where the file has data, or None if the file system's answer is not reliable. A stacked
/// file system may answer for a lower one that reports everything as a hole; the reported data is
/// then less than the space that the file takes. Only a look at the whole file tells, so the answer
/// for a part of it is None there: many parts would take as many looks.
pub fn known_data(file: &File, range: Range<u64>) -> io::Result<Option<Vec<Range<u64>>>> {
    // A block device has no holes, and SEEK_DATA fails on it.
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    if sys::knows_holes(file.as_fd())? {
        return extents(file, range).map(Some);
    }
    let facts = file.metadata()?;
    if range.start > 0 || range.end < facts.size() {
        return Ok(None);
    }
    let all = extents(file, range)?;
    let bytes: u64 = all.iter().map(|part| part.end - part.start).sum();
    // The space that a file takes includes a little that is not data.
    let believable =
        bytes.saturating_add(bytes / 8).saturating_add(1 << 20) >= facts.blocks() * 512;
    Ok(believable.then_some(all))
}

fn extents(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut parts = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let Some(start) = sys::seek_data(file.as_fd(), at)? else { break };
        if start >= range.end {
            break;
        }
        let end = sys::seek_hole(file.as_fd(), start)?.min(range.end);
        if end <= start {
            return Err(io::Error::other("file has no end to its data"));
        }
        parts.push(start..end);
        at = end;
    }
    Ok(parts)
}

/// Makes one file share all blocks of another, where the file system supports it.
pub fn clone(from: &File, to: &File) -> io::Result<()> {
    sys::clone_file(from.as_fd(), to.as_fd())
}

fn copy_by_hand(from: &File, to: &File, range: Range<u64>) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(BUFFER as u64) as usize;
        let bytes = buffer.get_mut(..len).unwrap_or_default();
        from.read_exact_at(bytes, at)?;
        for part in filled(bytes) {
            let start = part.start as u64;
            to.write_all_at(bytes.get(part).unwrap_or_default(), at + start)?;
        }
        at += len as u64;
    }
    Ok(())
}

/// Returns the parts of a buffer that are not zero, in blocks; adjacent ones are joined.
pub fn filled(bytes: &[u8]) -> Vec<Range<usize>> {
    const ZEROS: [u8; BLOCK] = [0; BLOCK];
    let mut parts: Vec<Range<usize>> = Vec::new();
    for (index, block) in bytes.chunks(BLOCK).enumerate() {
        let start = index * BLOCK;
        if ZEROS.starts_with(block) {
            continue;
        }
        match parts.last_mut() {
            Some(last) if last.end == start => last.end = start + block.len(),
            _ => parts.push(start..start + block.len()),
        }
    }
    parts
}

fn retry(mut act: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match act() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_moves_data_and_keeps_holes() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        from.set_len(64 << 20).unwrap();
        to.set_len(64 << 20).unwrap();
        from.write_all_at(b"here", 1 << 20).unwrap();
        from.write_all_at(b"there", (40 << 20) + 17).unwrap();
        copy(&from, &to, 0..64 << 20).unwrap();
        let mut got = [0; 5];
        to.read_exact_at(&mut got, (40 << 20) + 17).unwrap();
        assert_eq!(&got, b"there");
        assert!(data(&to, 0..64 << 20).unwrap().len() <= 2);
        assert!(std::os::unix::fs::MetadataExt::blocks(&to.metadata().unwrap()) < 1024);
    }

    #[test]
    fn data_of_a_part_stays_within_it() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 8 * BLOCK], 0).unwrap();
        let part = BLOCK as u64..3 * BLOCK as u64;
        assert_eq!(data(&file, part.clone()).unwrap(), [part]);
    }

    #[test]
    fn punch_makes_a_range_read_as_zero() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 4 * BLOCK], 0).unwrap();
        punch(&file, BLOCK as u64..2 * BLOCK as u64).unwrap();
        let mut got = vec![1; BLOCK];
        file.read_exact_at(&mut got, BLOCK as u64).unwrap();
        assert!(got.iter().all(|byte| *byte == 0));
    }
}
