//! The writable disk of one VM: a private copy of an empty ext4 filesystem, mostly holes.
//! It has no name in any directory, so a VMM that is killed leaves nothing of it behind.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::cache::{Cache, CacheError};
use crate::progress::Progress;
use crate::sys;
use crate::tool::{self, ToolError};

/// What a VM gets unless told otherwise. It costs the host only what the guest writes.
pub const DEFAULT_BYTES: u64 = 8 << 30;
/// Below this ext4 has no room for itself; above, the tables of an empty one are no longer small.
pub const MIN_BYTES: u64 = 16 << 20;
pub const MAX_BYTES: u64 = 1 << 40;

const KIND: &str = "disks";
const IMAGE: &str = "empty.ext4";
/// Raised when the options below change.
const LAYOUT: u32 = 1;
const DEADLINE: Duration = Duration::from_secs(60);
/// All block groups' tables go together at the start, so the data of an empty disk is one stretch.
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

/// The empty disk of this size, made once and kept.
pub fn pristine(
    cache: &Cache,
    bytes: u64,
    progress: &mut dyn Progress,
) -> Result<PathBuf, OverlayError> {
    if !(MIN_BYTES..=MAX_BYTES).contains(&bytes) {
        return Err(OverlayError::Size { bytes });
    }
    // In whole blocks, so that the file and the filesystem agree on where it ends.
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

/// A fresh writable disk for one VM, in the filesystem of `dir`; it vanishes with its last user.
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
        // A new file is all zeroes. Said here, it also keeps the guest from zeroing the inode tables
        // in the background, which would write to the host and wake an idle VM.
        .args(["-E", "packed_meta_blocks=1,nodiscard,assume_storage_prezeroed=1,root_owner=0:0"])
        .arg(image)
        .arg(format!("{}k", bytes / 1024));
    tool::run(command, "e2fsprogs", DEADLINE, |_| ())
        .map(drop)
        .map_err(|source| OverlayError::Make { source })
}

/// A file without a name; on filesystems that lack that, one whose name is gone at once.
fn unnamed(dir: &Path) -> Result<File, OverlayError> {
    let failed = |source| OverlayError::Create { path: dir.to_owned(), source };
    let open = |flags, path: &Path| {
        OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(path)
    };
    match open(libc::O_TMPFILE, dir) {
        Err(err) if matches!(err.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            let path = dir.join(format!(".disk.{}", std::process::id()));
            let _ = fs::remove_file(&path);
            let file = open(libc::O_CREAT | libc::O_EXCL, &path).map_err(failed)?;
            fs::remove_file(&path).map_err(failed)?;
            Ok(file)
        }
        result => result.map_err(failed),
    }
}

/// Shares the blocks where the filesystem can, and copies those that are not holes where not.
fn copy(from: &File, to: &File) -> io::Result<()> {
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
