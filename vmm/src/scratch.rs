//! Files without a name for what a machine writes to its disks and nobody keeps.
//!
//! They are gone with the last process that holds them, however it ends. They belong on a disk: a
//! guest that writes to files in a tmpfs takes the host's memory, as much as its disk is large.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::sys;

/// By its standard a place for temporary files that outlives a reboot, and so is on a disk.
const ON_DISK: &str = "/var/tmp";

/// A folder that cannot hold the disk writes of machines.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// The folder is on a file system that keeps its files in memory.
    #[error("disk writes of VMs would take this host's memory: {} is on {kind}", dir.display())]
    InMemory {
        /// The folder.
        dir: PathBuf,
        /// The file system: `tmpfs` or `ramfs`.
        kind: &'static str,
    },
    /// The file system of the folder cannot hold files without a name.
    #[error("{} keeps no files without a name (O_TMPFILE)", dir.display())]
    NoUnnamed {
        /// The folder.
        dir: PathBuf,
    },
    /// A file cannot be made in the folder for another reason.
    #[error("cannot make files in {}", dir.display())]
    Make {
        /// The folder.
        dir: PathBuf,
        /// The error of the file system.
        #[source]
        source: io::Error,
    },
}

/// Where such files are made.
#[derive(Clone, Debug)]
pub struct Scratch {
    dir: Option<PathBuf>,
    in_memory: bool,
}

impl Scratch {
    /// Describes where files are made: in `dir`, or without one as in a VM's
    /// [configuration](crate::VmConfig). A folder in memory is refused unless `in_memory` is set.
    /// Nothing is opened yet.
    pub fn new(dir: Option<&Path>, in_memory: bool) -> Self {
        Self { dir: dir.map(Path::to_owned), in_memory }
    }

    /// An empty file beside `path`, on the same file system, if that can be.
    pub fn file_beside(&self, path: &Path) -> Option<File> {
        open_in(path.parent()?, self.in_memory).ok()
    }

    /// An empty file.
    pub fn file(&self) -> io::Result<File> {
        let open = |dir: &Path| open_in(dir, self.in_memory);
        let made = match &self.dir {
            Some(dir) => open(dir),
            None => open(&std::env::temp_dir())
                .or_else(|error| open(Path::new(ON_DISK)).map_err(|_| error)),
        };
        made.map_err(|error| {
            let cause = std::error::Error::source(&error).map(|e| format!(": {e}"));
            let fix = "set scratch_dir to a folder on a disk";
            io::Error::other(format!("{error}{}: {fix}", cause.unwrap_or_default()))
        })
    }
}

/// A nameless file in `dir`, which may be in memory only where that is said.
fn open_in(dir: &Path, in_memory: bool) -> Result<File, ScratchError> {
    let failed = |source| ScratchError::Make { dir: dir.to_owned(), source };
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC).mode(0o600);
    let file = options.open(dir).map_err(|error| match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::EISDIR) => ScratchError::NoUnnamed { dir: dir.to_owned() },
        _ => failed(error),
    })?;
    match sys::memory_file_system(&file).map_err(failed)? {
        Some(kind) if !in_memory => Err(ScratchError::InMemory { dir: dir.to_owned(), kind }),
        _ => Ok(file),
    }
}

/// Whether the disk writes of machines can go to files in `dir`, for those who want to know before.
pub fn check(dir: &Path) -> Result<(), ScratchError> {
    open_in(dir, false).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_in_memory_is_refused_unless_it_is_asked_for() {
        let memory = Path::new("/dev/shm");
        let error = Scratch::new(Some(memory), false).file().unwrap_err().to_string();
        assert!(error.contains("/dev/shm is on tmpfs"), "{error}");
        assert!(error.contains("scratch_dir"), "{error}");
        assert!(Scratch::new(Some(memory), true).file().is_ok());
        assert!(matches!(check(memory), Err(ScratchError::InMemory { .. })));
    }

    #[test]
    fn scratch_where_no_unnamed_file_can_be_is_refused_and_not_in_memory() {
        for dir in ["/proc/self", "/no/such/folder"] {
            let error = Scratch::new(Some(Path::new(dir)), false).file().unwrap_err().to_string();
            assert!(error.contains(dir) && error.contains("scratch_dir"), "{error}");
        }
    }
}
