//! Takes a root filesystem from an archive, a folder or a guest into a tree, as it is.
//!
//! Nothing that arrives is trusted: names, links, kinds and sizes may be meant to reach the host.
//! So a path leads down from the root and never up, links are resolved as the guest would and never
//! by the host, and there is a cap on bytes and on entries.

use std::cell::Cell;
use std::fs::{self, File, FileTimes};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sha2::{Digest, Sha256};
use tar::EntryType;

use super::layer::Placed;
use super::tree::{Attribute, Tree};
use super::{RootfsError, image};
use crate::budget::{Budget, MAX_HEAD};
use crate::cache;
use crate::compression;
use crate::progress::Progress;

/// The most bytes of all files together.
const MAX_BYTES: u64 = 16 << 30;
const MAX_ENTRIES: u64 = 1_000_000;
/// The longest path; debugfs reads lines of 8 KiB, in which a quote takes two bytes.
const MAX_PATH: usize = 2048;
const CHUNK: usize = 64 << 10;
/// Entries between two signs of progress.
const EVERY: u64 = 500;
/// Directories that the guest mounts on.
const MOUNT_POINTS: [(&str, u32); 5] =
    [("dev", 0o755), ("proc", 0o755), ("run", 0o755), ("sys", 0o755), ("tmp", 0o1777)];
/// The extended attribute with the capabilities of a program.
const CAPABILITY: &str = "security.capability";
/// The beginning of the names of extended attributes that users set.
const OF_USERS: &str = "user.";
const MAX_ATTRIBUTES: usize = 16;
const MAX_ATTRIBUTE: usize = 2048;
const MAX_ATTRIBUTE_NAME: usize = 128;
/// The most of `/etc/os-release` that is read.
const MAX_RELEASE: u64 = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("cannot read the root filesystem")]
    Read { source: io::Error },
    #[error("the entry {entry:?} {why}")]
    Refused { entry: PathBuf, why: &'static str },
    #[error("cannot unpack {entry:?}")]
    Unpack { entry: PathBuf, source: io::Error },
    #[error("cannot read {}", path.display())]
    ReadFolder { path: PathBuf, source: io::Error },
    #[error("the root filesystem has more than {} GiB", MAX_BYTES >> 30)]
    TooLarge,
    #[error("the root filesystem has more than {MAX_ENTRIES} files and folders")]
    TooMany,
    #[error("the root filesystem has no files")]
    Empty,
    #[error("interrupted while unpacking")]
    Interrupted,
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
}

/// Owner, mode and time of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Facts {
    mode: u32,
    uid: u32,
    gid: u32,
    modified: Option<SystemTime>,
}

enum Content<'a> {
    Directory,
    File(&'a mut dyn Read),
    Symlink(PathBuf),
    /// Another name of a file that is already there.
    HardLink(PathBuf),
}

/// A root filesystem that is being taken in.
pub struct Import<'a> {
    pub(super) tree: Tree,
    progress: &'a mut dyn Progress,
    hash: Sha256,
    entries: u64,
    bytes: u64,
    /// While a layer of an image is unpacked: what it has put into the tree.
    pub(super) placed: Option<Placed>,
}

impl<'a> Import<'a> {
    pub(crate) fn begin(
        root: &Path,
        progress: &'a mut dyn Progress,
    ) -> Result<Import<'a>, ImportError> {
        let tree = Tree::empty(root)?;
        Ok(Import { tree, progress, hash: Sha256::new(), entries: 0, bytes: 0, placed: None })
    }

    /// Unpacks an archive (plain, gzip or zstd) below the path `below` of the root. The stream is
    /// read to its end.
    pub fn tar(&mut self, below: &Path, stream: impl Read) -> Result<(), ImportError> {
        let stream = compression::open(stream).map_err(|source| ImportError::Read { source })?;
        self.unpack(below, stream)
    }

    /// Unpacks an archive that is not compressed.
    pub(super) fn unpack(&mut self, below: &Path, stream: impl Read) -> Result<(), ImportError> {
        let failed = |source| ImportError::Read { source };
        let budget = Cell::new(MAX_HEAD);
        let mut archive = tar::Archive::new(Budget { inner: stream, left: &budget });
        let mut entries = archive.entries().map_err(failed)?;
        loop {
            budget.set(MAX_HEAD);
            let Some(entry) = entries.next() else { break };
            let mut entry = entry.map_err(failed)?;
            budget.set(u64::MAX);
            self.archived(below, &mut entry)?;
            // The rest of an entry would otherwise count as the head of the next one.
            self.copy(&mut entry, &mut io::sink()).map_err(failed)??;
        }
        budget.set(u64::MAX);
        // A compressed stream is only checked to its end.
        let mut rest = archive.into_inner();
        self.copy(&mut rest, &mut io::sink()).map_err(failed)?
    }

    fn archived<R: Read>(
        &mut self,
        below: &Path,
        entry: &mut tar::Entry<'_, R>,
    ) -> Result<(), ImportError> {
        let failed = |source| ImportError::Read { source };
        let name = entry.path().map_err(failed)?.into_owned();
        let header = entry.header();
        let kind = header.entry_type();
        if kind.is_pax_global_extensions() {
            return Ok(());
        }
        let refuse = |why| ImportError::Refused { entry: name.clone(), why };
        let id = |id: io::Result<u64>| {
            let id = id.map_err(failed)?;
            u32::try_from(id).map_err(|_| refuse("has an owner beyond 32 bits"))
        };
        let facts = Facts {
            mode: header.mode().map_err(failed)? & 0o7777,
            uid: id(header.uid())?,
            gid: id(header.gid())?,
            modified: time(header.mtime().unwrap_or_default()),
        };
        let inner = below.join(inner_path(&name)?);
        if self.placed.is_some() && self.white_out(&inner)? {
            return Ok(());
        }
        let attributes = attributes(entry, &refuse)?;
        let target = entry.link_name().map_err(failed)?.map(|target| target.into_owned());
        let content = match (kind, target) {
            (EntryType::Directory, _) => Content::Directory,
            (EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse, _) => {
                Content::File(entry)
            }
            (EntryType::Symlink, Some(target)) => Content::Symlink(target),
            (EntryType::Link, Some(target)) => {
                let target = inner_path(&target)
                    .map_err(|_| refuse("is a link to a file outside the root"))?;
                Content::HardLink(below.join(target))
            }
            (EntryType::Char | EntryType::Block, _) => return Err(refuse("is a device")),
            (EntryType::Fifo, _) => return Err(refuse("is a pipe")),
            _ => return Err(refuse("is of an unknown kind")),
        };
        let is_link = matches!(content, Content::Symlink(_) | Content::HardLink(_));
        self.put(&inner, facts, content)?;
        if !attributes.is_empty() && !is_link {
            self.hash.update(cache::key(attributes.iter().map(|(_, value)| &value[..])));
            let path = self.tree.place(&inner)?;
            self.tree.set_attributes(&path, attributes);
        }
        Ok(())
    }

    /// Takes in a folder of this host. Links are copied as links; files of the folder's own owner
    /// belong to root afterwards, others keep their owners.
    pub fn folder(&mut self, folder: &Path) -> Result<(), ImportError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| ImportError::ReadFolder { path, source }
        };
        let own = fs::metadata(folder).map_err(at(folder))?;
        let mut todo = vec![PathBuf::new()];
        while let Some(directory) = todo.pop() {
            let path = folder.join(&directory);
            let mut names = Vec::new();
            for entry in fs::read_dir(&path).map_err(at(&path))? {
                names.push(entry.map_err(at(&path))?.file_name());
            }
            names.sort_unstable();
            for name in names {
                let (path, inner) = (path.join(&name), directory.join(&name));
                let meta = fs::symlink_metadata(&path).map_err(at(&path))?;
                let owned = |id, own| if id == own { 0 } else { id };
                let facts = Facts {
                    mode: meta.mode() & 0o7777,
                    uid: owned(meta.uid(), own.uid()),
                    gid: owned(meta.gid(), own.gid()),
                    modified: meta.modified().ok(),
                };
                if meta.is_dir() {
                    todo.push(inner.clone());
                    self.put(&inner, facts, Content::Directory)?;
                } else if meta.is_symlink() {
                    let target = fs::read_link(&path).map_err(at(&path))?;
                    self.put(&inner, facts, Content::Symlink(target))?;
                } else if meta.is_file() {
                    let mut file = File::open(&path).map_err(at(&path))?;
                    self.put(&inner, facts, Content::File(&mut file))?;
                } else {
                    let why = "is neither a file, a folder nor a link";
                    return Err(ImportError::Refused { entry: path, why });
                }
            }
        }
        Ok(())
    }

    /// Adds a symbolic link of root's.
    pub fn link(&mut self, inner: &Path, target: &Path) -> Result<(), ImportError> {
        let facts = Facts { mode: 0o777, uid: 0, gid: 0, modified: None };
        self.put(&inner_path(inner)?, facts, Content::Symlink(target.to_owned()))
    }

    /// Adds a file of root's.
    pub fn file(
        &mut self,
        inner: &Path,
        mode: u32,
        content: &mut dyn Read,
    ) -> Result<(), ImportError> {
        let facts = Facts { mode, uid: 0, gid: 0, modified: None };
        self.put(&inner_path(inner)?, facts, Content::File(content))
    }

    fn put(&mut self, inner: &Path, facts: Facts, content: Content<'_>) -> Result<(), ImportError> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES {
            return Err(ImportError::TooMany);
        }
        if self.entries.is_multiple_of(EVERY) {
            self.progress.detail(&format!("{} files", self.entries));
        }
        let refuse = |why| ImportError::Refused { entry: inner.to_owned(), why };
        match inner.to_str() {
            _ if inner.as_os_str().len() > MAX_PATH => return Err(refuse("has too long a path")),
            None => return Err(refuse("has a name that is not UTF-8")),
            Some(text) if text.contains('\n') => {
                return Err(refuse("has a line break in its name"));
            }
            Some(_) => (),
        }
        self.note(inner, &facts, &content);
        if inner.as_os_str().is_empty() {
            // The root itself is always root's and open to all.
            return Ok(());
        }
        let failed = |source| ImportError::Unpack { entry: inner.to_owned(), source };
        let is_directory = matches!(content, Content::Directory);
        let path = if is_directory && self.placed.is_none() {
            self.tree.resolve(inner)?
        } else {
            self.tree.place(inner)?
        };
        if let Some(placed) = &mut self.placed {
            placed.insert(self.tree.inside(&path).to_owned());
            // A folder stays under a folder; anything else gives way to an entry of this layer.
            let there = fs::symlink_metadata(&path);
            if there.is_ok_and(|meta| meta.is_dir() != is_directory || meta.is_symlink()) {
                self.tree.remove(&path)?;
            }
        }
        match content {
            Content::Directory => fs::create_dir_all(&path).map_err(failed)?,
            Content::File(reader) => {
                super::tree::remove(&path).map_err(failed)?;
                let mut file = File::create_new(&path).map_err(failed)?;
                self.copy(reader, &mut file).map_err(failed)??;
                // Holes at the end have no data to write.
                let length = file.stream_position().map_err(failed)?;
                file.set_len(length).map_err(failed)?;
                if let Some(modified) = facts.modified {
                    file.set_times(FileTimes::new().set_modified(modified)).map_err(failed)?;
                }
            }
            Content::Symlink(target) => {
                super::tree::remove(&path).map_err(failed)?;
                symlink(&target, &path).map_err(failed)?;
            }
            Content::HardLink(target) => {
                let from = self.tree.place(&target)?;
                if !fs::symlink_metadata(&from).is_ok_and(|meta| meta.is_file()) {
                    return Err(refuse("is a link to a file that does not come before it"));
                }
                if from != path {
                    super::tree::remove(&path).map_err(failed)?;
                    fs::hard_link(&from, &path).map_err(failed)?;
                }
                let meta = self.tree.meta(self.tree.inside(&from));
                self.tree.set_meta(&path, meta);
                return Ok(());
            }
        }
        self.tree.set_attributes(&path, Vec::new());
        self.tree.own_path(&path, facts.uid, facts.gid);
        if fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_symlink()) {
            return Ok(());
        }
        let at = self.tree.inside(&path).to_owned();
        Ok(self.tree.set_mode(&at, &path, facts.mode, is_directory)?)
    }

    /// Adds an entry to the digest, without its data.
    fn note(&mut self, inner: &Path, facts: &Facts, content: &Content<'_>) {
        let (kind, target) = match content {
            Content::Directory => ("directory", None),
            Content::File(_) => ("file", None),
            Content::Symlink(target) => ("symlink", Some(target)),
            Content::HardLink(target) => ("link", Some(target)),
        };
        let target = target.map_or(&b""[..], |target| target.as_os_str().as_bytes());
        let owner = format!("{:o} {} {}", facts.mode, facts.uid, facts.gid);
        let parts = [inner.as_os_str().as_bytes(), kind.as_bytes(), target, owner.as_bytes()];
        self.hash.update(cache::key(parts));
    }

    /// Copies a stream with a cap; blocks of zeros become holes.
    fn copy(
        &mut self,
        from: &mut dyn Read,
        to: &mut dyn Sink,
    ) -> io::Result<Result<(), ImportError>> {
        let mut buffer = vec![0; CHUNK];
        loop {
            let count = match from.read(&mut buffer) {
                Ok(0) => return Ok(Ok(())),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.bytes += count as u64;
            if self.bytes > MAX_BYTES {
                return Ok(Err(ImportError::TooLarge));
            }
            if self.progress.interrupted() {
                return Ok(Err(ImportError::Interrupted));
            }
            let data = &buffer[..count];
            self.hash.update(data);
            to.take(data)?;
        }
    }

    /// Writes the image. Returns the name of the system and the digest of all that was taken in.
    pub(crate) fn finish(mut self, image: &Path) -> Result<(String, String), ImportError> {
        if self.entries == 0 {
            return Err(ImportError::Empty);
        }
        for (name, mode) in MOUNT_POINTS {
            self.tree.directory(name, mode)?;
        }
        self.progress.done();
        self.progress.step("Writing the ext4 image");
        image::write(&self.tree, image, self.progress)?;
        self.progress.done();
        let digest = cache::hex(&self.hash.finalize());
        Ok((release(&self.tree), digest))
    }
}

/// Returns the extended attributes of an entry that mean something in a guest: capabilities, and
/// those of users.
fn attributes<R: Read>(
    entry: &mut tar::Entry<'_, R>,
    refuse: &impl Fn(&'static str) -> ImportError,
) -> Result<Vec<Attribute>, ImportError> {
    let failed = |source| ImportError::Read { source };
    let mut found = Vec::new();
    for extension in entry.pax_extensions().map_err(failed)?.into_iter().flatten() {
        let extension = extension.map_err(failed)?;
        let name = extension.key().ok().and_then(|key| key.strip_prefix("SCHILY.xattr."));
        let Some(name) = name.filter(|it| *it == CAPABILITY || it.starts_with(OF_USERS)) else {
            continue;
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if name.len() > MAX_ATTRIBUTE_NAME || !name.chars().all(plain) {
            return Err(refuse("has an extended attribute with an odd name"));
        }
        let value = extension.value_bytes();
        if value.len() > MAX_ATTRIBUTE || found.len() == MAX_ATTRIBUTES {
            return Err(refuse("has too many extended attributes, or too long ones"));
        }
        found.push((name.to_owned(), value.to_vec()));
    }
    Ok(found)
}

/// Takes the chunks of a copy.
trait Sink {
    fn take(&mut self, data: &[u8]) -> io::Result<()>;
}

impl Sink for File {
    fn take(&mut self, data: &[u8]) -> io::Result<()> {
        if data.iter().all(|byte| *byte == 0) {
            self.seek(SeekFrom::Current(data.len() as i64)).map(drop)
        } else {
            self.write_all(data)
        }
    }
}

impl Sink for io::Sink {
    fn take(&mut self, _: &[u8]) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a path relative to the root. One that is absolute or leads up is refused.
fn inner_path(path: &Path) -> Result<PathBuf, ImportError> {
    let refuse = |why| ImportError::Refused { entry: path.to_owned(), why };
    let mut inner = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => inner.push(name),
            Component::CurDir => (),
            Component::ParentDir => return Err(refuse("has '..' in its path")),
            Component::RootDir | Component::Prefix(_) => return Err(refuse("is an absolute path")),
        }
    }
    Ok(inner)
}

fn time(seconds: u64) -> Option<SystemTime> {
    // Beyond what a file system keeps.
    (seconds < 1 << 33).then(|| UNIX_EPOCH.checked_add(Duration::from_secs(seconds)))?
}

/// Returns `PRETTY_NAME` of the system. Its file is found as the guest would find it.
fn release(tree: &Tree) -> String {
    let read = |inner: &str| {
        let path = tree.resolve(Path::new(inner)).ok()?;
        let is_file = fs::symlink_metadata(&path).ok()?.is_file();
        let file = File::open(path).ok().filter(|_| is_file)?;
        let mut text = Vec::new();
        file.take(MAX_RELEASE).read_to_end(&mut text).ok()?;
        Some(String::from_utf8_lossy(&text).into_owned())
    };
    let text = read("etc/os-release").or_else(|| read("usr/lib/os-release")).unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let name = name.unwrap_or("unknown").trim_matches('"');
    name.chars().filter(|char| !char.is_control()).take(100).collect()
}

#[cfg(test)]
#[path = "import_tests.rs"]
mod tests;
