//! The writable disk of one VM: a private copy of an empty ext4 filesystem, mostly holes.
//!
//! It is an unnamed file, so that a killed monitor process leaves nothing of it behind.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::cache::{Cache, CacheError};
use crate::progress::Progress;
use crate::sys;
use crate::tool::{self, ToolError};

/// The default disk size of a VM. The host stores only what the guest writes.
pub const DEFAULT_BYTES: u64 = 8 << 30;
/// Below this ext4 has no room for its metadata; above, the metadata of an empty disk is large.
pub const MIN_BYTES: u64 = 16 << 20;
pub const MAX_BYTES: u64 = 1 << 40;

const KIND: &str = "disks";
const IMAGE: &str = "empty.ext4";
/// Increased when the options below change.
const LAYOUT: u32 = 1;
const DEADLINE: Duration = Duration::from_secs(60);
/// Keeps the metadata of all block groups together at the start, so that an empty disk's data is
/// one extent.
const GROUPS_TOGETHER: &str = "8192";

#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error("--disk: {bytes} bytes is not between 16M and 1T")]
    Size { bytes: u64 },
    #[error("cannot make an empty disk")]
    Make { source: ToolError },
    #[error("cannot create a disk in {}", path.display())]
    Create { path: PathBuf, source: io::Error },
    #[error("cannot open the empty disk {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("cannot copy the empty disk to {}", path.display())]
    Copy { path: PathBuf, source: io::Error },
}

/// Returns the empty disk of this size, made once and cached.
pub fn pristine(
    cache: &Cache,
    bytes: u64,
    progress: &mut dyn Progress,
) -> Result<PathBuf, OverlayError> {
    if !(MIN_BYTES..=MAX_BYTES).contains(&bytes) {
        return Err(OverlayError::Size { bytes });
    }
    // Rounded up to whole blocks, so that file and filesystem have one size.
    let bytes = bytes.next_multiple_of(4096);
    let name = format!("empty-{bytes}-{LAYOUT}");
    let path = cache.path(KIND, &name).join(IMAGE);
    let there = |dir: &Path| dir.join(IMAGE).exists();
    if there(&cache.path(KIND, &name)) {
        return Ok(path);
    }
    cache.publish(KIND, &name, progress, there, |dir, _| make(&dir.join(IMAGE), bytes))?;
    Ok(path)
}

/// Creates a writable disk for one VM on the filesystem of `dir`; it is freed with its last
/// descriptor.
pub fn create_upper(cache: &Cache, dir: &Path, bytes: u64) -> Result<File, OverlayError> {
    let pristine = pristine(cache, bytes, &mut crate::progress::Silent)?;
    let from = File::open(&pristine)
        .map_err(|source| OverlayError::Open { path: pristine.clone(), source })?;
    let to = unnamed(dir)?;
    copy(&from, &to).map_err(|source| OverlayError::Copy { path: dir.to_owned(), source })?;
    Ok(to)
}

fn make(image: &Path, bytes: u64) -> Result<(), OverlayError> {
    let mut command = Command::new("mke2fs");
    command
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0"])
        // No journal: the disk does not outlive its VM, so there is nothing to recover.
        .args(["-O", "^has_journal,^resize_inode", "-G", GROUPS_TOGETHER])
        // A new file is all zeros. Stating that also keeps the guest from zeroing the inode tables
        // in the background, which would write to the host and wake an idle VM.
        .args(["-E", "packed_meta_blocks=1,nodiscard,assume_storage_prezeroed=1,root_owner=0:0"])
        .arg(image)
        .arg(format!("{}k", bytes / 1024));
    tool::run_quietly(command, "e2fsprogs", DEADLINE)
        .map(drop)
        .map_err(|source| OverlayError::Make { source })
}

/// Creates an unnamed file; on filesystems without O_TMPFILE, a file that is unlinked at once.
pub fn unnamed(dir: &Path) -> Result<File, OverlayError> {
    let failed = |source| OverlayError::Create { path: dir.to_owned(), source };
    let open = |flags, path: &Path| {
        OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(path)
    };
    match open(libc::O_TMPFILE, dir) {
        Err(err) if matches!(err.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = dir.join(format!(".disk.{}.{number}", std::process::id()));
            let _ = fs::remove_file(&path);
            let file = open(libc::O_CREAT | libc::O_EXCL, &path).map_err(failed)?;
            fs::remove_file(&path).map_err(failed)?;
            Ok(file)
        }
        result => result.map_err(failed),
    }
}

/// Shares the blocks of `from` where the filesystem supports it; otherwise copies all but the
/// holes.
pub(crate) fn copy(from: &File, to: &File) -> io::Result<()> {
    if sys::reflink(from, to).is_ok() {
        return Ok(());
    }
    to.set_len(from.metadata()?.len())?;
    let mut buffer = vec![0; 256 * 1024];
    let mut at = 0;
    while let Some((start, end)) = sys::next_data(from, at)? {
        at = start;
        while at < end {
            let n = buffer.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
            from.read_exact_at(&mut buffer[..n], at)?;
            to.write_all_at(&buffer[..n], at)?;
            at += n as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::progress::Silent;

    fn cache() -> (tempfile::TempDir, Cache) {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(&dir.path().join("pvmm")).unwrap();
        (dir, cache)
    }

    fn fsck(path: &Path) -> Vec<String> {
        let mut command = Command::new("e2fsck");
        command.arg("-fn").arg(path);
        tool::run_quietly(command, "e2fsprogs", DEADLINE).unwrap().out
    }

    #[test]
    fn disk_of_default_size_is_nearly_all_hole() {
        let (dir, cache) = cache();
        let disk = create_upper(&cache, dir.path(), DEFAULT_BYTES).unwrap();
        let meta = disk.metadata().unwrap();
        assert_eq!(meta.len(), DEFAULT_BYTES);
        assert!(meta.blocks() * 512 < 1 << 20, "{} bytes", meta.blocks() * 512);
    }

    #[test]
    fn disk_has_no_name_and_the_content_of_the_empty_one() {
        let (dir, cache) = cache();
        let work = dir.path().join("vm");
        fs::create_dir(&work).unwrap();
        let disk = create_upper(&cache, &work, MIN_BYTES).unwrap();
        assert_eq!(fs::read_dir(&work).unwrap().count(), 0);
        let mut bytes = vec![0; MIN_BYTES as usize];
        disk.read_exact_at(&mut bytes, 0).unwrap();
        let copy = dir.path().join("copy");
        fs::write(&copy, bytes).unwrap();
        assert!(fsck(&copy).iter().any(|line| line.contains("11/")));
    }

    #[test]
    fn disk_written_to_leaves_the_next_one_clean() {
        let (dir, cache) = cache();
        let first = create_upper(&cache, dir.path(), MIN_BYTES).unwrap();
        first.write_all_at(&[0xff; 8192], 0).unwrap();
        fsck(&pristine(&cache, MIN_BYTES, &mut Silent).unwrap());
    }

    #[test]
    fn empty_disk_asks_nothing_of_the_guest_in_the_background() {
        let (_dir, cache) = cache();
        let mut command = Command::new("dumpe2fs");
        command.arg(pristine(&cache, DEFAULT_BYTES, &mut Silent).unwrap());
        let said = tool::run_quietly(command, "e2fsprogs", DEADLINE).unwrap().out;
        let groups = said.iter().filter(|line| line.contains(": (Blocks ")).count();
        let zeroed = said.iter().filter(|line| line.contains("ITABLE_ZEROED")).count();
        assert_eq!((groups, zeroed), (64, 64));
    }

    #[test]
    fn disk_of_odd_size_is_rounded_up_to_whole_blocks() {
        let (dir, cache) = cache();
        let disk = create_upper(&cache, dir.path(), MIN_BYTES + 1).unwrap();
        assert_eq!(disk.metadata().unwrap().len(), MIN_BYTES + 4096);
    }

    #[test]
    fn disk_of_impossible_size_is_refused() {
        let (dir, cache) = cache();
        for bytes in [0, MIN_BYTES - 1, MAX_BYTES + 1, u64::MAX] {
            let err = create_upper(&cache, dir.path(), bytes).unwrap_err();
            assert!(matches!(err, OverlayError::Size { .. }), "{err}");
        }
    }

    #[test]
    fn disk_in_missing_directory_names_it() {
        let (dir, cache) = cache();
        let err = create_upper(&cache, &dir.path().join("no"), MIN_BYTES).unwrap_err();
        assert!(err.to_string().ends_with("/no"), "{err}");
    }
}
