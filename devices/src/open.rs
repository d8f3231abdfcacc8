//! Opens a file by a given path, without blocking on a FIFO.
//!
//! Checking a path before opening it would leave time to replace it by a FIFO. A path is therefore
//! opened without blocking, and the open file is checked.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use crate::sys;

/// The access with which a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    ReadWrite,
}

/// Opens a regular file. Anything else is refused.
pub fn file(path: &Path, access: Access) -> io::Result<File> {
    open(path, access, 0, "is not a regular file", |kind| kind.is_file())
}

/// Opens a regular file or a block device. Anything else is refused.
pub fn image(path: &Path, access: Access) -> io::Result<File> {
    let why = "is neither a regular file nor a block device";
    open(path, access, 0, why, |kind| kind.is_file() || kind.is_block_device())
}

/// Opens a regular file or a folder at a path that others may have replaced. Symbolic links are not
/// followed.
pub fn found(path: &Path) -> io::Result<File> {
    let why = "is neither a regular file nor a folder";
    open(path, Access::Read, libc::O_NOFOLLOW, why, |kind| kind.is_file() || kind.is_dir())
}

/// Opens an open file again, read-only. Where there is no `/proc`, as in a jail, it returns a clone
/// of the descriptor instead.
pub fn read_only(file: &File) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    match OpenOptions::new().read(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => file.try_clone(),
        opened => opened,
    }
}

fn open(
    path: &Path,
    access: Access,
    flags: libc::c_int,
    why_not: &'static str,
    is_usable: impl FnOnce(FileType) -> bool,
) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(access == Access::ReadWrite).custom_flags(flags | libc::O_NONBLOCK);
    let file = options.open(path)?;
    if !is_usable(file.metadata()?.file_type()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why_not));
    }
    // From here on reads block as usual.
    sys::set_direct(&file, false)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    #[test]
    fn open_of_a_pipe_is_refused_and_waits_for_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for access in [Access::Read, Access::ReadWrite] {
            assert_eq!(file(&pipe, access).unwrap_err().kind(), io::ErrorKind::InvalidInput);
            assert_eq!(image(&pipe, access).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        assert_eq!(found(&pipe).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn open_of_a_file_gives_it_and_found_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let (plain, link) = (dir.path().join("plain"), dir.path().join("link"));
        std::fs::write(&plain, "bytes").unwrap();
        symlink(&plain, &link).unwrap();
        assert_eq!(file(&plain, Access::ReadWrite).unwrap().metadata().unwrap().len(), 5);
        assert_eq!(image(&link, Access::Read).unwrap().metadata().unwrap().len(), 5);
        assert!(found(&plain).is_ok() && found(dir.path()).is_ok());
        assert!(found(&link).is_err());
        assert!(file(dir.path(), Access::Read).is_err());
    }
}
