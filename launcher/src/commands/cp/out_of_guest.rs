//! Copies a file from a guest to the host, and decides where a file or folder goes here.
//!
//! The guest controls everything that arrives. So a symbolic link at the destination is replaced
//! and not followed, a file appears under its name only when it is complete, and set-id bits are
//! dropped.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use pvmm::agent::{FileKind, Metadata, SparseError};

use super::{Copy, destination, ends_with_slash, in_guest, on_host, tree};
use crate::exit::Failure;
use pvmm_sandbox::sys::process;

pub fn copy(copy: &mut Copy, source: &Path, target: &Path) -> Result<(), Failure> {
    // A symbolic link given as the source is followed; links inside a folder are copied as links.
    let metadata = copy.agent.stat(source, true).map_err(in_guest("read", source))?;
    let there = match fs::metadata(target) {
        Ok(there) => Some(there),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(on_host("look at", target)(error)),
    };
    let is_directory = there.as_ref().is_some_and(fs::Metadata::is_dir);
    if there.is_none() && ends_with_slash(target) && metadata.kind != FileKind::Directory {
        return Err(Failure::usage(format!("{} is no folder here", target.display())));
    }
    let to = destination(source, target, is_directory);
    if metadata.kind == FileKind::Directory && there.is_some() && !is_directory {
        let message =
            format!("{} is a file, {} in the VM a folder", to.display(), source.display());
        return Err(Failure::usage(message));
    }
    if !matches!(metadata.kind, FileKind::Directory | FileKind::File) {
        let message = format!("{} in the VM is neither a file nor a folder", source.display());
        return Err(Failure::usage(message));
    }
    match metadata.kind {
        FileKind::Directory => tree::out_of_guest(copy, source, &to),
        _ => file(copy, source, &to, &metadata),
    }
}

fn set_mode(path: &Path, metadata: &Metadata) -> Result<(), Failure> {
    let mode = Permissions::from_mode(metadata.mode & 0o777);
    fs::set_permissions(path, mode).map_err(on_host("set the mode of", path))
}

fn file(copy: &mut Copy, from: &Path, to: &Path, metadata: &Metadata) -> Result<(), Failure> {
    let mut reader = copy.agent.open_read_sparse(from).map_err(in_guest("read", from))?;
    let temporary = Temporary::beside(to)?;
    let mut at = 0;
    loop {
        copy.stop_if_interrupted()?;
        let count = reader.copy_some(&temporary.file, at).map_err(|error| match error {
            SparseError::Here(error) => on_host("write", to)(error),
            SparseError::Agent(error) => in_guest("read", from)(error),
        })?;
        if count == 0 {
            break;
        }
        // Holes take no data and are not counted.
        if reader.received() > copy.caps.bytes {
            return Err(copy.caps.too_large(from));
        }
        at += count;
        copy.transfer.add(count);
    }
    if copy.owners {
        fchown(&temporary.file, Some(metadata.uid), Some(metadata.gid))
            .map_err(on_host("give away", to))?;
    }
    set_mode(&temporary.path, metadata)?;
    temporary.become_file(to)
}

/// Returns a random name in the folder of `path`.
fn temporary_name(path: &Path) -> Result<PathBuf, Failure> {
    let random: [u8; 8] = process::random()?;
    let name = format!(".pvmm-{:016x}", u64::from_ne_bytes(random));
    Ok(path.with_file_name(name))
}

/// A file that is removed on drop, unless it is complete.
struct Temporary {
    path: PathBuf,
    file: File,
}

impl Temporary {
    fn beside(path: &Path) -> Result<Self, Failure> {
        let temporary = temporary_name(path)?;
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let file = options.open(&temporary).map_err(on_host("write", path))?;
        Ok(Self { path: temporary, file })
    }

    /// Renames the file to `path`; a symbolic link there is replaced, not followed.
    fn become_file(self, path: &Path) -> Result<(), Failure> {
        fs::rename(&self.path, path).map_err(on_host("write", path))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // After a rename there is no file of that name.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_where_a_link_stands_replaces_the_link() {
        let dir = tempfile::tempdir().unwrap();
        let (outside, link) = (dir.path().join("outside"), dir.path().join("link"));
        fs::write(&outside, "kept").unwrap();
        std::os::unix::fs::symlink(&outside, &link).unwrap();
        let temporary = Temporary::beside(&link).unwrap();
        io::Write::write_all(&mut &temporary.file, b"new").unwrap();
        temporary.become_file(&link).unwrap();
        assert_eq!(fs::read_to_string(&outside).unwrap(), "kept");
        assert_eq!(fs::read_to_string(&link).unwrap(), "new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn temporary_that_is_dropped_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        drop(Temporary::beside(&dir.path().join("x")).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
