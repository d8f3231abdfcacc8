//! Writes a file from the client's pipe: a new one in place of the old, or into the old one.

use std::fs::{self, File, Metadata as FsMetadata, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use pvmm_guest_agent::message::WriteFile;
use pvmm_guest_agent::sparse::{Piece, SegmentDecoder};

use super::transfer::Transfer;
use super::{AtPath, CHUNK, FileContext, Result, TEMPORARY_NAMES, errno, make_directory, path};

pub fn write(request: &WriteFile, pipe: File, context: &FileContext) -> Result<u64> {
    let path = path(&request.path);
    if request.parents
        && let Some(parent) = path.parent()
    {
        make_directory(parent, None, true)?;
    }
    if request.in_place {
        write_in_place(request, path, pipe, context)
    } else {
        replace(request, path, pipe, context)
    }
}

/// Writes a new file next to the old one, and renames it over the old one at the end.
fn replace(request: &WriteFile, path: &Path, pipe: File, context: &FileContext) -> Result<u64> {
    // A link is followed, as a write to it would be.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let old = match fs::symlink_metadata(&target) {
        Ok(facts) if facts.is_dir() => return Err(errno(libc::EISDIR)).at(path, "write"),
        Ok(facts) if facts.is_file() => Some(facts),
        Ok(facts) if !facts.is_symlink() => {
            // A device or a FIFO must not be replaced by a file.
            return Err(errno(libc::EINVAL)).at(path, "replace");
        }
        _ => None,
    };
    let (temporary, mut file) = make_temporary(&target, context.id)?;
    let filled = if request.sparse {
        fill_sparse(&mut file, pipe, path, context)
    } else {
        fill(&mut file, pipe, path, context)
    };
    let written = filled
        .and_then(|total| dress(request, &file, old.as_ref(), path).map(|()| total))
        .and_then(|total| {
            fs::rename(&temporary, &target).at(path, "rename")?;
            Ok(total)
        });
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    let total = written?;
    if request.sync
        && let Some(parent) = target.parent()
    {
        File::open(parent).and_then(|folder| folder.sync_all()).at(path, "sync")?;
    }
    Ok(total)
}

fn make_temporary(target: &Path, id: u64) -> Result<(PathBuf, File)> {
    let folder = target.parent().unwrap_or(Path::new("/"));
    for attempt in 0..TEMPORARY_NAMES {
        let name = folder.join(format!(".pvmm-{}-{id}-{attempt}.tmp", std::process::id()));
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&name);
        match made {
            Ok(file) => return Ok((name, file)),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e).at(target, "create"),
        }
    }
    Err(errno(libc::EEXIST)).at(target, "create")
}

fn write_in_place(
    request: &WriteFile,
    path: &Path,
    pipe: File,
    context: &FileContext,
) -> Result<u64> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(request.offset.is_none())
        .mode(request.mode.unwrap_or(0o644) & 0o7777)
        .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK)
        .open(path)
        .at(path, "open")?;
    if let Some(offset) = request.offset.filter(|offset| *offset > 0) {
        file.seek(SeekFrom::Start(offset)).at(path, "seek")?;
    }
    let total = fill(&mut file, pipe, path, context)?;
    let facts = file.metadata().at(path, "stat")?;
    dress(request, &file, Some(&facts), path)?;
    Ok(total)
}

/// Copies the input into the file; fails unless the client ended the input.
fn fill(file: &mut File, mut pipe: File, path: &Path, context: &FileContext) -> Result<u64> {
    let mut transfer = Transfer::default();
    let mut total = 0;
    loop {
        match transfer.pass(&mut pipe, file, u64::MAX).at(path, "write")? {
            0 => break,
            count => total += count,
        }
    }
    if context.committed.load(Ordering::Acquire) {
        Ok(total)
    } else {
        Err(ErrorKind::BrokenPipe.into()).at(path, "receive")
    }
}

/// Writes the segments of the input into the file: holes are left out, and the file has its length
/// at the end. Fails unless the client ended the input.
fn fill_sparse(file: &mut File, mut pipe: File, path: &Path, context: &FileContext) -> Result<u64> {
    let mut decoder = SegmentDecoder::default();
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    let bad = || errno(libc::EPROTO);
    loop {
        let count = match pipe.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e).at(path, "receive"),
        };
        let mut bytes = &buffer[..count];
        while let Some(piece) = decoder.next(&mut bytes).map_err(|_| bad()).at(path, "receive")? {
            at += match piece {
                Piece::Data(data) => {
                    file.write_all_at(data, at).at(path, "write")?;
                    data.len() as u64
                }
                Piece::Hole(len) => len,
            };
        }
    }
    if !context.committed.load(Ordering::Acquire) {
        return Err(ErrorKind::BrokenPipe.into()).at(path, "receive");
    }
    let total = decoder.finish().map_err(|_| bad()).at(path, "receive")?;
    file.set_len(total).at(path, "write")?;
    Ok(total)
}

/// Sets the owner and mode of a file: the requested ones, else those of the old file.
fn dress(request: &WriteFile, file: &File, old: Option<&FsMetadata>, path: &Path) -> Result<()> {
    let owner = request.owner.map(|owner| (owner.uid, owner.gid));
    let owner = owner.or(old.map(|old| (old.uid(), old.gid())));
    if let Some((uid, gid)) = owner {
        let now = file.metadata().at(path, "stat")?;
        if (now.uid(), now.gid()) != (uid, gid) {
            fchown(file, Some(uid), Some(gid)).at(path, "chown")?;
        }
    }
    // After the owner, whose change clears set-id bits.
    let regular = file.metadata().at(path, "stat")?.is_file();
    let mode = request.mode.or(old.map(|old| old.mode())).unwrap_or(0o644) & 0o7777;
    if regular {
        file.set_permissions(fs::Permissions::from_mode(mode)).at(path, "chmod")?;
    }
    if request.sync {
        file.sync_all().at(path, "sync")?;
    }
    Ok(())
}
