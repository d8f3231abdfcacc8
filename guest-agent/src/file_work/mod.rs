//! File work: read, write, stat, list, remove, mkdir, move.
//!
//! Bytes stream through a pipe, so no file is ever held in memory, however large.

mod read;
mod transfer;
mod write;

use std::ffi::OsStr;
use std::fs::{self, File, Metadata as FsMetadata};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pvmm_guest_agent::archive::ArchiveError;
use pvmm_guest_agent::message::{
    Answer, ByteBuf, Code, DirEntry, Failure, FileKind, Metadata, Outcome, Remove, Request, Symlink,
};

use crate::pool::{Reporter, WorkerReport};
use crate::{sys, tree_work, watch};

/// Bytes moved at once.
const CHUNK: usize = 256 << 10;
/// Names tried for a temporary file before giving up.
const TEMPORARY_NAMES: u32 = 100;

/// The context of a file request.
pub struct FileContext {
    pub id: u64,
    /// The worker's end of the stream's pipe.
    pub pipe: Option<File>,
    /// Set when the input ended because the client ended it.
    pub committed: Arc<AtomicBool>,
}

/// A failed request: the error, its path, and the operation.
struct FileFault {
    error: io::Error,
    path: PathBuf,
    doing: &'static str,
}

impl From<ArchiveError> for FileFault {
    fn from(error: ArchiveError) -> Self {
        // Prefer the kernel's error, if there is one.
        let source = error.errno().map(io::Error::from_raw_os_error);
        let ArchiveError { act, path, source: other } = error;
        Self { path, doing: act, error: source.unwrap_or(other) }
    }
}

type Result<T> = std::result::Result<T, FileFault>;

trait AtPath<T> {
    fn at(self, path: &Path, doing: &'static str) -> Result<T>;
}

impl<T> AtPath<T> for io::Result<T> {
    fn at(self, path: &Path, doing: &'static str) -> Result<T> {
        self.map_err(|error| FileFault { error, path: path.to_owned(), doing })
    }
}

/// Carries out a file request.
pub fn carry_out(request: Request, mut context: FileContext, reporter: &Reporter) -> Outcome {
    let id = context.id;
    let pipe = context.pipe.take();
    let result = match (request, pipe) {
        (Request::ReadFile(request), Some(pipe)) => read::read(&request, pipe, |metadata| {
            reporter.send(WorkerReport::Started(id, Some(metadata)));
        })
        .map(Answer::Transferred),
        (Request::WriteFile(request), Some(pipe)) => {
            write::write(&request, pipe, &context).map(Answer::Transferred)
        }
        (Request::List(request), Some(pipe)) => {
            list(path(&request.path), pipe).map(Answer::Transferred)
        }
        (Request::Stat(request), _) => {
            stat(path(&request.path), request.follow).map(Answer::Metadata)
        }
        (Request::Remove(request), _) => remove(&request).map(|()| Answer::Done {}),
        (Request::Mkdir(request), _) => {
            make_directory(path(&request.path), request.mode, request.parents)
                .map(|()| Answer::Done {})
        }
        (Request::Move(request), _) => {
            let (from, to) = (path(&request.from), path(&request.to));
            sys::rename(from, to, request.no_replace).at(from, "rename").map(|()| Answer::Done {})
        }
        (Request::Symlink(request), _) => symlink(&request, id).map(|()| Answer::Done {}),
        (Request::ReadTar(request), Some(pipe)) => {
            let root = path(&request.path);
            tree_work::check(root).at(root, "read").and_then(|facts| {
                reporter.send(WorkerReport::Started(id, Some(metadata(root, &facts))));
                tree_work::read(root, pipe).map(Answer::Transferred).map_err(FileFault::from)
            })
        }
        (Request::WriteTar(request), Some(pipe)) => {
            tree_work::write(&request, path(&request.path), pipe, &context.committed)
                .map(Answer::Transferred)
                .map_err(FileFault::from)
        }
        (Request::Watch(request), Some(pipe)) => {
            let root = path(&request.path);
            let begun = || reporter.send(WorkerReport::Started(id, None));
            watch::watch(&request, root, pipe, begun).at(root, "watch").map(Answer::Transferred)
        }
        _ => Err(FileFault {
            error: ErrorKind::Unsupported.into(),
            path: PathBuf::new(),
            doing: "unknown",
        }),
    };
    match result {
        Ok(answer) => Outcome::Ok(answer),
        Err(fault) => Outcome::Failed(failure(fault)),
    }
}

fn failure(fault: FileFault) -> Failure {
    let cancelled = fault.error.kind() == ErrorKind::BrokenPipe;
    Failure {
        code: if cancelled { Code::Cancelled } else { Code::Io },
        errno: fault.error.raw_os_error(),
        path: Some(ByteBuf::from(fault.path.as_os_str().as_bytes())),
        message: fault.doing.into(),
    }
}

fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// Makes a link under a temporary name and renames it, so that either the old or the new one
/// exists.
fn symlink(request: &Symlink, id: u64) -> Result<()> {
    let link = path(&request.path);
    if fs::symlink_metadata(link).is_ok_and(|facts| facts.is_dir()) {
        return Err(errno(libc::EISDIR)).at(link, "link");
    }
    let folder = link.parent().unwrap_or(Path::new("/"));
    for attempt in 0..TEMPORARY_NAMES {
        let name = folder.join(format!(".pvmm-{}-{id}-{attempt}.link", std::process::id()));
        match std::os::unix::fs::symlink(path(&request.target), &name) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
            made => made.at(link, "link")?,
        }
        let owned = match request.owner {
            Some(owner) => std::os::unix::fs::lchown(&name, Some(owner.uid), Some(owner.gid)),
            None => Ok(()),
        };
        let placed = owned.and_then(|()| fs::rename(&name, link));
        if placed.is_err() {
            let _ = fs::remove_file(&name);
        }
        return placed.at(link, "link");
    }
    Err(errno(libc::EEXIST)).at(link, "link")
}

fn stat(path: &Path, follow: bool) -> Result<Metadata> {
    let facts = if follow { fs::metadata(path) } else { fs::symlink_metadata(path) };
    Ok(metadata(path, &facts.at(path, "stat")?))
}

/// Sends each entry as a length (u32, little-endian) and a MessagePack map.
fn list(path: &Path, mut pipe: File) -> Result<u64> {
    let mut buffer = Vec::with_capacity(CHUNK);
    let mut total = 0;
    for entry in fs::read_dir(path).at(path, "open")? {
        let entry = entry.at(path, "read")?;
        // The entry was removed since it was listed.
        let Ok(facts) = entry.metadata() else { continue };
        let entry = DirEntry {
            name: ByteBuf::from(entry.file_name().as_bytes()),
            metadata: metadata(&entry.path(), &facts),
        };
        let Ok(bytes) = rmp_serde::to_vec_named(&entry) else { continue };
        buffer.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        buffer.extend_from_slice(&bytes);
        total += 1;
        if buffer.len() >= CHUNK / 2 {
            pipe.write_all(&buffer).at(path, "send")?;
            buffer.clear();
        }
    }
    pipe.write_all(&buffer).at(path, "send")?;
    Ok(total)
}

fn remove(request: &Remove) -> Result<()> {
    let path = path(&request.path);
    let removed = fs::symlink_metadata(path).and_then(|facts| {
        if !facts.is_dir() {
            fs::remove_file(path)
        } else if fs::metadata("/").is_ok_and(|root| is_same(&root, &facts)) {
            Err(errno(libc::EBUSY))
        } else if request.recursive {
            // Never follows a link, even one put there meanwhile.
            fs::remove_dir_all(path)
        } else {
            fs::remove_dir(path)
        }
    });
    match removed {
        Err(e) if request.missing_ok && e.kind() == ErrorKind::NotFound => Ok(()),
        other => other.at(path, "remove"),
    }
}

fn is_same(a: &FsMetadata, b: &FsMetadata) -> bool {
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

fn make_directory(path: &Path, mode: Option<u32>, parents: bool) -> Result<()> {
    let existed = path.is_dir();
    let mut builder = fs::DirBuilder::new();
    builder.mode(0o755).recursive(parents).create(path).at(path, "mkdir")?;
    match mode.filter(|_| !existed) {
        // Explicitly, because the umask restricts the mode of mkdir.
        Some(mode) => {
            fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777)).at(path, "chmod")
        }
        None => Ok(()),
    }
}

fn metadata(path: &Path, facts: &FsMetadata) -> Metadata {
    let kind = facts.file_type();
    let kind = if kind.is_file() {
        FileKind::File
    } else if kind.is_dir() {
        FileKind::Directory
    } else if kind.is_symlink() {
        FileKind::Symlink
    } else if kind.is_fifo() {
        FileKind::Fifo
    } else if kind.is_socket() {
        FileKind::Socket
    } else if kind.is_char_device() {
        FileKind::CharDevice
    } else if kind.is_block_device() {
        FileKind::BlockDevice
    } else {
        FileKind::Other
    };
    let target = (kind == FileKind::Symlink)
        .then(|| fs::read_link(path).ok())
        .flatten()
        .map(|target| ByteBuf::from(target.as_os_str().as_bytes()));
    Metadata {
        kind,
        mode: facts.mode() & 0o7777,
        uid: facts.uid(),
        gid: facts.gid(),
        size: facts.size(),
        nlink: facts.nlink(),
        mtime_s: facts.mtime(),
        mtime_ns: facts.mtime_nsec() as u32,
        ctime: Some((facts.ctime(), facts.ctime_nsec() as u32)),
        target,
    }
}
