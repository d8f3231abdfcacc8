//! Unpacks an archive into a folder, and nowhere else.
//!
//! Names, kinds, lengths and links are untrusted. So a name leads down and never up, no link below
//! the folder is followed, and a file gets its name in one step when it is complete; an existing
//! file of that name is replaced and never written into.

use std::cell::Cell;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, lchown};
use std::path::{Component, Path, PathBuf};

use tar::{Archive, Entry, EntryType};

use super::{ArchiveError, At, errno};
use crate::limits::MAX_PATH;

/// The most bytes before an entry's own data: its header, long names, a map of pieces.
const MAX_HEAD: u64 = 4 << 20;
/// The default limit on the entries of one archive.
pub const MAX_ENTRIES: u64 = 1 << 22;
/// The longest file, holes included.
const MAX_FILE: u64 = 1 << 40;
/// The most folders whose modes must be set last because the owner could not write to them.
const MAX_CLOSED: usize = 1 << 16;
/// The mode bits that the owner of a folder needs to fill it.
const OPEN_TO_OWNER: u32 = 0o700;

/// How an archive is unpacked.
#[derive(Clone, Copy, Debug)]
pub struct Unpack {
    /// Give files the owners in the archive, not the unpacking user.
    pub owners: bool,
    /// The mode bits that are applied.
    pub modes: u32,
    /// More entries are refused with E2BIG.
    pub max_entries: u64,
}

/// Unpacks `archive` into the directory `target`, which is created if it is missing, and returns
/// the number of entries. Calls `left_out` for everything that is neither file nor folder nor link.
pub fn unpack(
    archive: impl Read,
    target: &Path,
    options: Unpack,
    left_out: &mut dyn FnMut(&Path),
) -> Result<u64, ArchiveError> {
    let budget = Cell::new(MAX_HEAD);
    let mut archive = Archive::new(Budget { inner: archive, left: &budget });
    archive.set_preserve_mtime(false);
    // Modes are set here, after the owner and before a file gets its name.
    archive.set_mask(!0);
    let fresh = make_folder(target, true)?;
    let mut into = Into { target, fresh, options, scratch: None, closed: Vec::new() };
    let mut count = 0;
    let mut entries = archive.entries().at(target, "read the archive for")?;
    loop {
        budget.set(MAX_HEAD);
        let Some(entry) = entries.next() else { break };
        let mut entry = entry.at(target, "read the archive for")?;
        budget.set(u64::MAX);
        count += 1;
        if count > options.max_entries {
            return Err(errno(libc::E2BIG)).at(target, "put so many files into");
        }
        into.entry(&mut entry, left_out)?;
        // Skip the rest of the entry's data.
        io::copy(&mut entry, &mut io::sink()).at(target, "read the archive for")?;
    }
    into.finish()?;
    Ok(count)
}

/// Stops a reader that reads too much before an entry's data.
struct Budget<'a, R> {
    inner: R,
    left: &'a Cell<u64>,
}

impl<R: Read> Read for Budget<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left.get() == 0 {
            return Err(errno(libc::E2BIG));
        }
        let most = (buffer.len() as u64).min(self.left.get()) as usize;
        let count = self.inner.read(&mut buffer[..most])?;
        if self.left.get() != u64::MAX {
            self.left.set(self.left.get() - count as u64);
        }
        Ok(count)
    }
}

struct Into<'a> {
    target: &'a Path,
    /// The target was created here, so its mode and owner come from the archive too.
    fresh: bool,
    options: Unpack,
    scratch: Option<Scratch>,
    /// Folders whose modes lock out their owner, set once they are filled.
    closed: Vec<(PathBuf, u32)>,
}

impl Into<'_> {
    fn entry<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        left_out: &mut dyn FnMut(&Path),
    ) -> Result<(), ArchiveError> {
        let name = below(&entry.path_bytes()).at(self.target, "put a file of that name into")?;
        let path = self.target.join(&name);
        let header = entry.header();
        let mode = header.mode().at(&path, "read the mode of")? & self.options.modes & 0o7777;
        let kind = header.entry_type();
        if kind == EntryType::Directory {
            if name.as_os_str().is_empty() && !self.fresh {
                return Ok(());
            }
            if let Some(parent) = name.parent() {
                self.make_parents(parent)?;
                make_folder(&path, false)?;
            }
            self.give_away(entry, &path)?;
            return self.set_mode_of_folder(path, mode);
        }
        let Some(parent) = name.parent() else {
            return Err(errno(libc::EISDIR)).at(&path, "replace");
        };
        match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                if entry.size() > MAX_FILE {
                    return Err(errno(libc::EFBIG)).at(&path, "write");
                }
                let temporary = self.scratch(parent)?;
                entry.unpack(&temporary).at(&path, "write")?;
                self.give_away(entry, &temporary)?;
                fs::set_permissions(&temporary, Permissions::from_mode(mode))
                    .at(&path, "set the mode of")?;
                self.put(&temporary, &path)
            }
            EntryType::Symlink => {
                let to = link_of(entry).at(&path, "link")?;
                let temporary = self.scratch(parent)?;
                std::os::unix::fs::symlink(to, &temporary).at(&path, "link")?;
                self.give_away(entry, &temporary)?;
                self.put(&temporary, &path)
            }
            EntryType::Link => {
                let to = link_of(entry).and_then(|to| below(to.as_os_str().as_bytes()));
                let to = to.at(&path, "link")?;
                // The target of a hard link must lie in the folder and must be a regular file, not
                // a link.
                self.check_parents(to.parent().unwrap_or(Path::new("")))?;
                let to = self.target.join(to);
                if !fs::symlink_metadata(&to).at(&to, "link to")?.is_file() {
                    return Err(errno(libc::EPERM)).at(&to, "link to");
                }
                if to == path {
                    return Ok(());
                }
                let temporary = self.scratch(parent)?;
                fs::hard_link(&to, &temporary).at(&path, "link")?;
                self.put(&temporary, &path)?;
                // Renaming one of two names of a file over the other keeps both.
                let _ = fs::remove_file(&temporary);
                Ok(())
            }
            _ => {
                left_out(&path);
                Ok(())
            }
        }
    }

    fn set_mode_of_folder(&mut self, path: PathBuf, mode: u32) -> Result<(), ArchiveError> {
        if mode & OPEN_TO_OWNER != OPEN_TO_OWNER {
            if self.closed.len() >= MAX_CLOSED {
                return Err(errno(libc::E2BIG)).at(&path, "remember the mode of");
            }
            self.closed.push((path, mode));
            return Ok(());
        }
        fs::set_permissions(&path, Permissions::from_mode(mode)).at(&path, "set the mode of")
    }

    fn make_parents(&self, name: &Path) -> Result<(), ArchiveError> {
        let mut path = self.target.to_owned();
        for part in name.components() {
            path.push(part);
            make_folder(&path, false)?;
        }
        Ok(())
    }

    /// Checks that the path to a name leads through folders and nothing else.
    fn check_parents(&self, name: &Path) -> Result<(), ArchiveError> {
        let mut path = self.target.to_owned();
        for part in name.components() {
            path.push(part);
            check_folder(&path)?;
        }
        Ok(())
    }

    /// Returns a name in a private folder on the filesystem of `parent`.
    fn scratch(&mut self, parent: &Path) -> Result<PathBuf, ArchiveError> {
        let parent = self.target.join(parent);
        if self.scratch.as_ref().is_none_or(|scratch| scratch.parent != parent) {
            let below = parent.strip_prefix(self.target).unwrap_or(Path::new(""));
            self.make_parents(below)?;
            // The old folder is removed before a new one is made.
            self.scratch = None;
            self.scratch = Some(Scratch::make(parent)?);
        }
        let dir = self.scratch.as_ref().map(|scratch| scratch.dir.join("new"));
        Ok(dir.unwrap_or_default())
    }

    fn put(&self, temporary: &Path, path: &Path) -> Result<(), ArchiveError> {
        fs::rename(temporary, path).at(path, "replace")
    }

    fn give_away<R: Read>(&self, entry: &Entry<'_, R>, path: &Path) -> Result<(), ArchiveError> {
        if !self.options.owners {
            return Ok(());
        }
        let id = |id: io::Result<u64>| {
            id.and_then(|id| u32::try_from(id).map_err(|_| errno(libc::EINVAL)))
                .at(path, "read the owner of")
        };
        let (uid, gid) = (id(entry.header().uid())?, id(entry.header().gid())?);
        lchown(path, Some(uid), Some(gid)).at(path, "give away")
    }

    fn finish(mut self) -> Result<(), ArchiveError> {
        self.scratch = None;
        for (path, mode) in self.closed.iter().rev() {
            fs::set_permissions(path, Permissions::from_mode(*mode)).at(path, "set the mode of")?;
        }
        Ok(())
    }
}

/// A private folder next to the files that are being made. Dropping it removes it and its contents.
struct Scratch {
    parent: PathBuf,
    dir: PathBuf,
}

impl Scratch {
    const NAMES: u32 = 100;

    fn make(parent: PathBuf) -> Result<Self, ArchiveError> {
        for attempt in 0..Self::NAMES {
            let dir = parent.join(format!(".pvmm-{}-{attempt}.new", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&dir) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                made => {
                    made.at(&dir, "make")?;
                    return Ok(Self { parent, dir });
                }
            }
        }
        Err(errno(libc::EEXIST)).at(&parent, "make a folder in")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Converts the name of an entry to a path that leads down; empty for the folder itself.
fn below(name: &[u8]) -> io::Result<PathBuf> {
    if name.len() > MAX_PATH || name.contains(&0) || name.is_empty() {
        return Err(errno(libc::EINVAL));
    }
    let mut path = PathBuf::new();
    for part in Path::new(std::ffi::OsStr::from_bytes(name)).components() {
        match part {
            Component::Normal(part) => path.push(part),
            Component::CurDir => {}
            Component::RootDir | Component::ParentDir | Component::Prefix(_) => {
                return Err(errno(libc::EINVAL));
            }
        }
    }
    Ok(path)
}

fn link_of<R: Read>(entry: &Entry<'_, R>) -> io::Result<PathBuf> {
    let link = entry.link_name_bytes().ok_or_else(|| errno(libc::EINVAL))?;
    if link.is_empty() || link.len() > MAX_PATH || link.contains(&0) {
        return Err(errno(libc::EINVAL));
    }
    Ok(PathBuf::from(std::ffi::OsStr::from_bytes(&link)))
}

/// Creates a folder and returns whether it was created. An existing folder may be used, a link to
/// one only with `follow`.
fn make_folder(path: &Path, follow: bool) -> Result<bool, ArchiveError> {
    match DirBuilder::new().mode(0o755).create(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let is_folder =
                if follow { path.is_dir() } else { return check_folder(path).map(|()| false) };
            if is_folder {
                Ok(false)
            } else {
                Err(errno(libc::ENOTDIR)).at(path, "use as a folder")
            }
        }
        Err(error) => Err(error).at(path, "make"),
    }
}

fn check_folder(path: &Path) -> Result<(), ArchiveError> {
    if fs::symlink_metadata(path).at(path, "look at")?.is_dir() {
        Ok(())
    } else {
        Err(errno(libc::ENOTDIR)).at(path, "use as a folder")
    }
}
