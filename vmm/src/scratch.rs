//! Files without a name for what a machine writes and nobody keeps.
//!
//! They are gone with the last process that holds them, however it ends.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Where such files are made.
#[derive(Clone, Debug)]
pub struct Scratch {
    dir: PathBuf,
}

impl Scratch {
    pub fn new(dir: Option<&Path>) -> Self {
        Self { dir: dir.map_or_else(std::env::temp_dir, Path::to_owned) }
    }

    /// An empty file. In memory where the file system knows no nameless ones.
    pub fn file(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC).mode(0o600);
        match options.open(&self.dir) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
                crate::memory::memfd(c"pvmm-disk", 0)
            }
            result => result,
        }
    }
}
