//! The working set of a snapshot that is two files, in a third file.
//!
//! The two files cannot have it: they are written before anybody has loaded them, and clients may
//! sign or copy them. So a VM that was loaded writes the pages that it touched, and later loads
//! prefault them. The file is only a help: one that is missing, damaged or of another snapshot is
//! left alone.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::SnapshotError;
use super::sections::WorkingSetV1;
use super::written_file::WrittenFile;
use crate::memory::WorkingSet;

const MAGIC: [u8; 8] = *b"pvmm-ws1";
/// Magic, the snapshot's sum, and the sum of what follows.
const HEADER: usize = MAGIC.len() + 4 + 4;
/// The longest file that is read: two lists of as many ranges as a working set may have.
const LEN_MAX: u64 = 1 << 20;

/// Writes the working set of the snapshot whose memory has the checksums `memory_sums`.
pub fn write(path: &Path, memory_sums: &[u32], set: &WorkingSet) -> Result<(), SnapshotError> {
    let failed = |error: rmp_serde::encode::Error| SnapshotError::State(error.to_string());
    let body = rmp_serde::to_vec(&WorkingSetV1::of(set)).map_err(failed)?;
    let sums = [snapshot_sum(memory_sums), crc32fast::hash(&body)].map(u32::to_le_bytes);
    // Nobody named this file, so what a link points to is left alone.
    if path.symlink_metadata().is_ok_and(|facts| !facts.is_file()) {
        return Err(SnapshotError::Kind { file: path.display().to_string() });
    }
    let mut file = WrittenFile::create(path)?;
    file.write_all(&[&MAGIC[..], &sums[0], &sums[1], &body].concat())?;
    file.publish()
}

/// Reads the working set of the snapshot whose memory has `size` bytes and the checksums
/// `memory_sums`. Returns `None` if the file at `path` is not that.
pub fn read(path: &Path, memory_sums: &[u32], size: u64) -> Option<WorkingSet> {
    // Opening a pipe would block.
    if !path.symlink_metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(LEN_MAX).read_to_end(&mut bytes).ok()?;
    let (header, body) = bytes.split_at_checked(HEADER)?;
    let sums = [snapshot_sum(memory_sums), crc32fast::hash(body)].map(u32::to_le_bytes);
    if header != [&MAGIC[..], &sums[0], &sums[1]].concat() {
        return None;
    }
    rmp_serde::from_slice::<WorkingSetV1>(body).ok()?.check(size).ok()
}

fn snapshot_sum(memory_sums: &[u32]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    memory_sums.iter().for_each(|sum| hasher.update(&sum.to_le_bytes()));
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{PAGE, PageRanges};

    const SIZE: u64 = 64 * PAGE;

    #[test]
    fn set_is_read_for_its_own_snapshot_and_for_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.working-set");
        let set = WorkingSet {
            written: PageRanges::one(0..2 * PAGE),
            read: PageRanges::one(4 * PAGE..9 * PAGE),
        };
        assert_eq!(read(&path, &[1, 2], SIZE), None);
        write(&path, &[1, 2], &set).unwrap();
        assert_eq!(read(&path, &[1, 2], SIZE), Some(set));
        assert_eq!(read(&path, &[1, 3], SIZE), None);
        assert_eq!(read(&path, &[1, 2], 8 * PAGE), None, "ranges beyond the memory");
    }

    #[test]
    fn link_in_its_place_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("state.working-set"), dir.path().join("other"));
        std::fs::write(&other, "kept").unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert!(write(&path, &[1], &WorkingSet::default()).is_err());
        assert_eq!(std::fs::read(&other).unwrap(), b"kept");
    }

    #[test]
    fn file_with_any_byte_changed_or_missing_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.working-set");
        let set = WorkingSet { written: PageRanges::one(0..PAGE), ..WorkingSet::default() };
        write(&path, &[7], &set).unwrap();
        let good = std::fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            assert_eq!(read(&path, &[7], SIZE), None, "byte {at}");
            std::fs::write(&path, &good[..at]).unwrap();
            assert_eq!(read(&path, &[7], SIZE), None, "{at} bytes");
        }
    }
}
