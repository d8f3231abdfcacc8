//! The image of a volume: an ext4 file system that outlives the VMs that write it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::overlay;
use crate::tool::{self, ToolError};

/// Below this a journal has no room; above, metadata of an empty image is large.
pub const MIN_BYTES: u64 = 16 << 20;
pub const MAX_BYTES: u64 = 16 << 40;

const DEADLINE: Duration = Duration::from_secs(300);
/// The checker ends with 1 if it has mended something.
const CHECK: &str = r#"e2fsck -fp "$1" || [ $? -eq 1 ]"#;

#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    #[error("size: {bytes} bytes is not between 16M and 16T")]
    Size { bytes: u64 },
    #[error("size: a volume of {old} bytes cannot shrink to {new}")]
    Shrink { old: u64, new: u64 },
    #[error("cannot make a file system in {}", path.display())]
    Make { path: PathBuf, source: ToolError },
    #[error("cannot grow the file system in {}", path.display())]
    Grow { path: PathBuf, source: ToolError },
    #[error("cannot {act} {}", path.display())]
    Io { act: &'static str, path: PathBuf, source: io::Error },
}

/// Creates an image at `path`, where nothing is. The host stores only what is written to it.
pub fn create(path: &Path, bytes: u64) -> Result<(), VolumeError> {
    let bytes = checked(bytes)?;
    let at = |act| move |source| VolumeError::Io { act, path: path.to_owned(), source };
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(path).map_err(at("create"))?;
    file.set_len(bytes).map_err(at("create"))?;
    let mut command = Command::new("mke2fs");
    command
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-m", "0"])
        // A new file is all zeros; see `overlay.rs`.
        .args(["-E", "nodiscard,assume_storage_prezeroed=1,root_owner=0:0"])
        .arg(path);
    tool::run_quietly(command, "e2fsprogs", DEADLINE)
        .map_err(|source| VolumeError::Make { path: path.to_owned(), source })?;
    file.sync_all().map_err(at("write"))
}

/// Grows an image that no VM uses, and its file system.
pub fn grow(path: &Path, bytes: u64) -> Result<(), VolumeError> {
    let bytes = checked(bytes)?;
    let at = |act| move |source| VolumeError::Io { act, path: path.to_owned(), source };
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(at("open"))?;
    let old = file.metadata().map_err(at("read"))?.len();
    if bytes < old {
        return Err(VolumeError::Shrink { old, new: bytes });
    }
    file.set_len(bytes).map_err(at("grow"))?;
    // A volume whose VM was killed has a journal to replay first.
    for line in [CHECK, "exec resize2fs \"$1\""] {
        let mut command = Command::new("sh");
        command.args(["-c", line, "sh"]).arg(path);
        tool::run_quietly(command, "e2fsprogs", DEADLINE)
            .map_err(|source| VolumeError::Grow { path: path.to_owned(), source })?;
    }
    file.sync_all().map_err(at("write"))
}

/// Copies an image that no VM writes to `to`, where nothing is. The blocks are shared where the
/// file system supports it.
pub fn copy(from: &Path, to: &Path) -> Result<(), VolumeError> {
    let at = |act, path: &Path| {
        let path = path.to_owned();
        move |source| VolumeError::Io { act, path, source }
    };
    let source = File::open(from).map_err(at("open", from))?;
    let mut options = OpenOptions::new();
    let target = options.write(true).create_new(true).mode(0o600).open(to);
    let target = target.map_err(at("create", to))?;
    let copied = overlay::copy(&source, &target).and_then(|()| target.sync_all());
    copied.map_err(|error| {
        let _ = fs::remove_file(to);
        at("copy", from)(error)
    })
}

fn checked(bytes: u64) -> Result<u64, VolumeError> {
    if (MIN_BYTES..=MAX_BYTES).contains(&bytes) {
        Ok(bytes.next_multiple_of(4096))
    } else {
        Err(VolumeError::Size { bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_is_made_grown_and_copied_and_never_shrinks() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        create(&one, 16 << 20).unwrap();
        assert!(matches!(create(&one, 16 << 20), Err(VolumeError::Io { .. })));
        grow(&one, 64 << 20).unwrap();
        assert!(matches!(grow(&one, 32 << 20), Err(VolumeError::Shrink { .. })));
        copy(&one, &two).unwrap();
        assert_eq!(fs::read(&one).unwrap(), fs::read(&two).unwrap());
        assert!(matches!(create(&one, 1), Err(VolumeError::Size { bytes: 1 })));
    }
}
