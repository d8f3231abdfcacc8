//! Copies a file from the host into a guest, and decides where a file or folder goes there.

use std::fs::{self, File, Metadata};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use pvmm::agent::{FileKind, FileWriteOptions, Owner, SparseError};

use super::{Copy, destination, ends_with_slash, in_guest, on_host, tree};
use crate::exit::Failure;

/// Refuses a missing source before the guest is contacted.
pub fn check(source: &Path) -> Result<(), Failure> {
    fs::metadata(source).map(drop).map_err(on_host("read", source))
}

pub fn copy(copy: &mut Copy, source: &Path, target: &Path) -> Result<(), Failure> {
    // A symbolic link given as the source is followed; links inside a folder are copied as links.
    let metadata = fs::metadata(source).map_err(on_host("read", source))?;
    let there = match copy.agent.stat(target, true) {
        Ok(there) => Some(there.kind),
        Err(error) if error.errno() == Some(libc::ENOENT) => None,
        Err(error) => return Err(in_guest("look at", target)(error)),
    };
    let is_directory = there == Some(FileKind::Directory);
    if there.is_none() && ends_with_slash(target) && !metadata.is_dir() {
        return Err(Failure::usage(format!("{} is no folder in the VM", target.display())));
    }
    let to = destination(source, target, is_directory);
    if metadata.is_dir() && there.is_some() && !is_directory {
        let message =
            format!("{} in the VM is a file, {} a folder", to.display(), source.display());
        return Err(Failure::usage(message));
    }
    if metadata.is_dir() {
        tree::into_guest(copy, source, &to)
    } else if metadata.is_file() {
        file(copy, source, &to, &metadata)
    } else {
        let message = format!("{} is neither a file nor a folder", source.display());
        Err(Failure::usage(message))
    }
}

fn file(copy: &mut Copy, from: &Path, to: &Path, metadata: &Metadata) -> Result<(), Failure> {
    let source = File::open(from).map_err(on_host("read", from))?;
    let mode = Some(metadata.permissions().mode() & 0o7777);
    let owner = copy.owners.then(|| Owner { uid: metadata.uid(), gid: metadata.gid() });
    let options = FileWriteOptions { mode, owner, ..FileWriteOptions::default() };
    let mut writer = copy.agent.open_write_sparse(to, &options).map_err(in_guest("write", to))?;
    let mut at = 0;
    loop {
        copy.stop_if_interrupted()?;
        let count = writer.copy_some(&source, at).map_err(|error| match error {
            SparseError::Here(error) => on_host("read", from)(error),
            SparseError::Agent(error) => in_guest("write", to)(error),
        })?;
        if count == 0 {
            break;
        }
        at += count;
        copy.transfer.add(count);
    }
    writer.finish().map(drop).map_err(in_guest("write", to))
}
