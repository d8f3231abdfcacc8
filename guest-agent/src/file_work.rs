//! File work: read, write, stat, list, remove, mkdir, move.
//! Bytes stream through a pipe, so no file is ever held in memory, however large.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata as FsMetadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{
    DirBuilderExt, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pvmm_guest_agent::archive::ArchiveError;
use pvmm_guest_agent::message::{
    Answer, ByteBuf, Code, Entry, Failure, FileKind, Metadata, Outcome, ReadFile, Remove, Request,
    Symlink, WriteFile,
};
use pvmm_guest_agent::sparse::{Piece, SEGMENT_HEAD, Segment, SegmentDecoder};

use crate::pool::{Report, Reporter};
use crate::{sys, tree_work, watch};

/// What is moved at once.
const CHUNK: usize = 256 << 10;
/// Names tried for a temporary file before giving up.
const TEMPORARY_NAMES: u32 = 100;

/// What a worker has besides the request.
pub struct Context {
    pub id: u64,
    /// The worker's end of the stream's pipe.
    pub pipe: Option<File>,
    /// Raised when the input ended because the client ended it.
    pub committed: Arc<AtomicBool>,
}

/// A request that failed: the error, at which path, doing what.
struct Fault {
    error: io::Error,
    path: PathBuf,
    doing: &'static str,
}

impl From<ArchiveError> for Fault {
    fn from(error: ArchiveError) -> Self {
        // The kernel's own word, where there is one.
        let source = error.errno().map(io::Error::from_raw_os_error);
        let ArchiveError { act, path, source: other } = error;
        Self { path, doing: act, error: source.unwrap_or(other) }
    }
}

type Result<T> = std::result::Result<T, Fault>;

trait At<T> {
    fn at(self, path: &Path, doing: &'static str) -> Result<T>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, path: &Path, doing: &'static str) -> Result<T> {
        self.map_err(|error| Fault { error, path: path.to_owned(), doing })
    }
}

/// Carries a file request out and reports its outcome.
pub fn carry_out(request: Request, mut context: Context, reporter: &Reporter) {
    let id = context.id;
    let pipe = context.pipe.take();
    let result = match (request, pipe) {
        (Request::ReadFile(request), Some(pipe)) => read(&request, pipe, |metadata| {
            reporter.send(Report::Started(id, metadata));
        })
        .map(Answer::Transferred),
        (Request::WriteFile(request), Some(pipe)) => {
            write(&request, pipe, &context).map(Answer::Transferred)
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
                reporter.send(Report::Started(id, metadata(root, &facts)));
                tree_work::read(root, pipe).map(Answer::Transferred).map_err(Fault::from)
            })
        }
        (Request::WriteTar(request), Some(pipe)) => {
            tree_work::write(&request, path(&request.path), pipe, &context.committed)
                .map(Answer::Transferred)
                .map_err(Fault::from)
        }
        (Request::Watch(request), Some(pipe)) => {
            let root = path(&request.path);
            let begun = || reporter.send(Report::Begun(id));
            watch::watch(&request, root, pipe, begun).at(root, "watch").map(Answer::Transferred)
        }
        _ => Err(Fault {
            error: ErrorKind::Unsupported.into(),
            path: PathBuf::new(),
            doing: "unknown",
        }),
    };
    let outcome = match result {
        Ok(answer) => Outcome::Ok(answer),
        Err(fault) => Outcome::Failed(failure(fault)),
    };
    reporter.send(Report::Done(id, outcome));
}

fn failure(fault: Fault) -> Failure {
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

fn read(request: &ReadFile, mut pipe: File, started: impl FnOnce(Metadata)) -> Result<u64> {
    let path = path(&request.path);
    // Not blocking: opening a FIFO must not wait for somebody to write it.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path).at(path, "open")?;
    let facts = file.metadata().at(path, "stat")?;
    if facts.is_dir() {
        return Err(errno(libc::EISDIR)).at(path, "read");
    }
    if facts.file_type().is_fifo() || facts.file_type().is_socket() {
        return Err(errno(libc::EINVAL)).at(path, "read");
    }
    if request.offset > 0 {
        file.seek(SeekFrom::Start(request.offset)).at(path, "seek")?;
    }
    started(metadata(path, &facts));
    if request.sparse {
        return read_sparse(request, file, pipe, path);
    }
    let most = request.len.unwrap_or(u64::MAX);
    let mut way = Way::default();
    let mut total = 0;
    while total < most {
        match way.pass(&mut file, &mut pipe, most - total).at(path, "read")? {
            0 => break,
            count => total += count,
        }
    }
    Ok(total)
}

/// The way between a pipe and a file: within the kernel, or through a buffer where it cannot.
#[derive(Default)]
struct Way {
    buffer: Vec<u8>,
}

impl Way {
    /// Moves at most `most` bytes; none at the end.
    fn pass(&mut self, from: &mut File, to: &mut File, most: u64) -> io::Result<u64> {
        let most = most.min(CHUNK as u64) as usize;
        if self.buffer.is_empty() {
            match sys::splice(from, to, most) {
                // Devices and some filesystems: nothing was moved, and nothing will be this way.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => self.buffer = vec![0; CHUNK],
                moved => return moved.map(|count| count as u64),
            }
        }
        loop {
            match from.read(&mut self.buffer[..most]) {
                Ok(count) => {
                    to.write_all(&self.buffer[..count])?;
                    return Ok(count as u64);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

/// Sends data and holes as segments. Each chunk is a segment of its own, so that a file that changes
/// its length while it is read cannot break a promise.
fn read_sparse(request: &ReadFile, mut file: File, mut pipe: File, path: &Path) -> Result<u64> {
    let end = request.len.map_or(u64::MAX, |len| request.offset.saturating_add(len));
    let mut at = request.offset;
    // A segment's head and its bytes, which go together: a head alone would take a page of the pipe.
    let mut buffer = vec![0; SEGMENT_HEAD + CHUNK];
    let mut data_until = at;
    while at < end {
        if at >= data_until {
            let facts = file.metadata().at(path, "stat")?;
            let size = facts.len().min(end);
            // Where every byte has its place on the disk, nobody needs to be asked for holes.
            let has_holes = facts.blocks().saturating_mul(512) < facts.len();
            let found = |seek: io::Result<Option<u64>>| seek.ok().filter(|_| has_holes);
            let data = found(sys::next_data(&file, at)).map_or(at, |data| data.unwrap_or(size));
            let data = data.min(size);
            if data > at {
                pipe.write_all(&Segment::Hole(data - at).head()).at(path, "send")?;
                at = data;
            }
            let hole = found(sys::next_hole(&file, at)).flatten();
            data_until = hole.unwrap_or(u64::MAX).max(at + 1);
            file.seek(SeekFrom::Start(at)).at(path, "seek")?;
        }
        let most = (data_until.min(end) - at).min(CHUNK as u64) as usize;
        let (head, bytes) = buffer.split_at_mut(SEGMENT_HEAD);
        let count = match file.read(&mut bytes[..most]) {
            Ok(0) => break,
            Ok(count) => count,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e).at(path, "read"),
        };
        head.copy_from_slice(&Segment::Data(count as u64).head());
        pipe.write_all(&buffer[..SEGMENT_HEAD + count]).at(path, "send")?;
        at += count as u64;
    }
    Ok(at - request.offset)
}

fn write(request: &WriteFile, pipe: File, context: &Context) -> Result<u64> {
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

/// Writes a new file beside the old one and puts it in its place at the end.
fn replace(request: &WriteFile, path: &Path, pipe: File, context: &Context) -> Result<u64> {
    // Through a link to what it means, as writing to it would go.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let old = match fs::symlink_metadata(&target) {
        Ok(facts) if facts.is_dir() => return Err(errno(libc::EISDIR)).at(path, "write"),
        Ok(facts) if facts.is_file() => Some(facts),
        Ok(facts) if !facts.is_symlink() => {
            // A device or a FIFO is not to be replaced by a file.
            return Err(errno(libc::EINVAL)).at(path, "replace");
        }
        _ => None,
    };
    let (temporary, mut file) = make_temporary(&target, context.id)?;
    let filled = match request.sparse {
        true => fill_sparse(&mut file, pipe, path, context),
        false => fill(&mut file, pipe, path, context),
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

fn write_in_place(request: &WriteFile, path: &Path, pipe: File, context: &Context) -> Result<u64> {
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

/// Copies the input into the file; fails unless the client ended it.
fn fill(file: &mut File, mut pipe: File, path: &Path, context: &Context) -> Result<u64> {
    let mut way = Way::default();
    let mut total = 0;
    loop {
        match way.pass(&mut pipe, file, u64::MAX).at(path, "write")? {
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

/// The same with segments: holes are left out, and the file has its length at the end.
fn fill_sparse(file: &mut File, mut pipe: File, path: &Path, context: &Context) -> Result<u64> {
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

/// Makes a link beside and renames it, so that there is always one or the other.
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

/// Gives a file the owner and mode it is to have: those asked for, else those of the old file.
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
        // One that was removed since it was read is not there any more.
        let Ok(facts) = entry.metadata() else { continue };
        let entry = Entry {
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
            // Never follows a link on its way, also not one put there meanwhile.
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
        // Explicitly, since the mode of mkdir is cut by the umask.
        Some(mode) => {
            fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777)).at(path, "chmod")
        }
        None => Ok(()),
    }
}

fn metadata(path: &Path, facts: &FsMetadata) -> Metadata {
    let kind = facts.file_type();
    let kind = match () {
        () if kind.is_file() => FileKind::File,
        () if kind.is_dir() => FileKind::Directory,
        () if kind.is_symlink() => FileKind::Symlink,
        () if kind.is_fifo() => FileKind::Fifo,
        () if kind.is_socket() => FileKind::Socket,
        () if kind.is_char_device() => FileKind::CharDevice,
        () if kind.is_block_device() => FileKind::BlockDevice,
        () => FileKind::Other,
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
        target,
    }
}
