//! Copying from the host into a guest.
//!
//! The host's tree is the user's own and is taken as it is; special files are left out with a word.

use std::fs::{self, File, Metadata};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;

use pvmm::agent::{FileKind, SparseError, WriteOptions};

use super::{Copy, destination, ends_with_slash, in_guest, on_host};
use crate::exit::Failure;

/// Refuses a source that is not there before anyone is asked.
pub fn check(source: &Path) -> Result<(), Failure> {
    fs::metadata(source).map(drop).map_err(on_host("read", source))
}

pub fn copy(copy: &mut Copy, source: &Path, target: &Path) -> Result<(), Failure> {
    // A link that was named is followed; links inside a folder are kept as they are.
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
    entry(copy, source, &to, &metadata)
}

fn entry(copy: &mut Copy, from: &Path, to: &Path, metadata: &Metadata) -> Result<(), Failure> {
    copy.stop_if_interrupted()?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        directory(copy, from, to, metadata)
    } else if kind.is_symlink() {
        symlink(copy, from, to)
    } else if kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device()
    {
        copy.transfer.remark(&format!("left out {}: not a file, folder or link", from.display()));
        Ok(())
    } else {
        file(copy, from, to, metadata)
    }
}

fn directory(copy: &mut Copy, from: &Path, to: &Path, metadata: &Metadata) -> Result<(), Failure> {
    let mode = Some(metadata.permissions().mode() & 0o7777);
    match copy.agent.mkdir(to, mode, false) {
        Err(error) if error.errno() == Some(libc::EEXIST) => {}
        made => made.map_err(in_guest("make", to))?,
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(from).map_err(on_host("read", from))? {
        names.push(entry.map_err(on_host("read", from))?.file_name());
    }
    names.sort();
    for name in names {
        let (from, to) = (from.join(&name), to.join(&name));
        let metadata = fs::symlink_metadata(&from).map_err(on_host("read", &from))?;
        entry(copy, &from, &to, &metadata)?;
    }
    Ok(())
}

fn file(copy: &mut Copy, from: &Path, to: &Path, metadata: &Metadata) -> Result<(), Failure> {
    let source = File::open(from).map_err(on_host("read", from))?;
    let mode = Some(metadata.permissions().mode() & 0o7777);
    let options = WriteOptions { mode, ..WriteOptions::default() };
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

fn symlink(copy: &mut Copy, from: &Path, to: &Path) -> Result<(), Failure> {
    let points_to = fs::read_link(from).map_err(on_host("read", from))?;
    copy.agent.symlink(points_to, to).map_err(in_guest("make the link", to))
}
