//! Copying from a guest to the host.
//!
//! Everything here is the guest's choice: names, kinds, modes, links. So no link below the target is
//! ever followed, a file appears under its name only when it is whole, and no set-id bit arrives.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use pvmm::agent::{FileKind, Metadata, SparseError};

use super::{Copy, destination, ends_with_slash, in_guest, on_host};
use crate::exit::Failure;
use crate::sys::process;

pub fn copy(copy: &mut Copy, source: &Path, target: &Path) -> Result<(), Failure> {
    // A link that was named is followed; links inside a folder are kept as they are.
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
    entry(copy, source, &to, &metadata)
}

fn entry(copy: &mut Copy, from: &Path, to: &Path, metadata: &Metadata) -> Result<(), Failure> {
    copy.stop_if_interrupted()?;
    match metadata.kind {
        FileKind::Directory => directory(copy, from, to, metadata),
        FileKind::File => file(copy, from, to, metadata),
        FileKind::Symlink => symlink(to, metadata.target.as_ref().map_or(&[], |target| target)),
        _ => {
            let what = from.display();
            copy.transfer.remark(&format!("left out {what}: not a file, folder or link"));
            Ok(())
        }
    }
}

fn directory(copy: &mut Copy, from: &Path, to: &Path, metadata: &Metadata) -> Result<(), Failure> {
    make_directory(to)?;
    for child in copy.agent.list(from).map_err(in_guest("list", from))? {
        // The library refuses names that lead anywhere else.
        let name = OsStr::from_bytes(&child.name);
        entry(copy, &from.join(name), &to.join(name), &child.metadata)?;
    }
    // Last: a folder that may not be written to must be filled first.
    set_mode(to, metadata)
}

/// A directory of our own; one that is there already may be used, a link to one may not.
fn make_directory(path: &Path) -> Result<(), Failure> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let there = fs::symlink_metadata(path).map_err(on_host("look at", path))?;
            match there.is_dir() {
                true => Ok(()),
                false => {
                    Err(Failure::usage(format!("{} is in the way of a folder", path.display())))
                }
            }
        }
        made => made.map_err(on_host("make", path)),
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
        at += count;
        copy.transfer.add(count);
    }
    set_mode(&temporary.path, metadata)?;
    temporary.become_file(to)
}

/// A link replaces a link or a file of that name, never a directory.
fn symlink(to: &Path, points_to: &[u8]) -> Result<(), Failure> {
    let temporary = temporary_name(to)?;
    let made = std::os::unix::fs::symlink(OsStr::from_bytes(points_to), &temporary);
    made.and_then(|()| fs::rename(&temporary, to)).map_err(|error| {
        let _ = fs::remove_file(&temporary);
        on_host("make the link", to)(error)
    })
}

/// A name beside `path` that nobody has.
fn temporary_name(path: &Path) -> Result<PathBuf, Failure> {
    let random: [u8; 8] = process::random()?;
    let name = format!(".pvmm-{:016x}", u64::from_ne_bytes(random));
    Ok(path.with_file_name(name))
}

/// A file that is removed again unless it is complete.
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

    /// Takes the place of whatever had the name; a link there is replaced, not followed.
    fn become_file(self, path: &Path) -> Result<(), Failure> {
        fs::rename(&self.path, path).map_err(on_host("write", path))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // After a rename there is nothing of that name.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_where_a_link_stands_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/etc", &link).unwrap();
        assert!(make_directory(&link).is_err());
        make_directory(&dir.path().join("new")).unwrap();
        make_directory(&dir.path().join("new")).unwrap();
    }

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

    #[test]
    fn symlink_over_a_file_replaces_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, "old").unwrap();
        symlink(&path, b"elsewhere").unwrap();
        assert_eq!(fs::read_link(&path).unwrap(), Path::new("elsewhere"));
    }
}
