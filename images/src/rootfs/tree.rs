//! A root filesystem as a directory: packages unpacked into it, usr-merged, without unwanted parts.
//!
//! Owners and special modes are only recorded, because an ordinary user cannot set them; `image`
//! sets them.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File, FileTimes, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use tar::EntryType;

use super::RootfsError;
use crate::deb::{self, Part};

/// Top-level directories that are links into `/usr` in current Debian releases.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];

/// Data that no program reads at run time: manuals, translations, other tools' data, rare charsets.
const UNWANTED: [&str; 10] = [
    "usr/share/bug",
    "usr/share/doc",
    "usr/share/doc-base",
    "usr/share/i18n",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/menu",
    "usr/lib/x86_64-linux-gnu/gconv",
];

/// The file that makes pip refuse to install; in a disposable sandbox installing should work.
const PIP_REFUSAL: &str = "EXTERNALLY-MANAGED";

/// The kernel's limit of symbolic links in one path.
const LINKS_CAP: usize = 40;

/// The owner and mode of a path in the image, where those on disk differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Meta {
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Permission bits, only where they differ from those on disk.
    pub(super) mode: Option<u32>,
}

/// An extended attribute: its name and its value.
pub(super) type Attribute = (String, Vec<u8>);

pub(super) struct Tree {
    root: PathBuf,
    metas: BTreeMap<PathBuf, Meta>,
    /// Extended attributes for the image, by path.
    attributes: BTreeMap<PathBuf, Vec<Attribute>>,
    /// Directories known to exist and not to be links.
    directories: HashSet<PathBuf>,
}

impl Tree {
    fn new(root: &Path) -> Tree {
        Tree {
            root: root.to_owned(),
            metas: BTreeMap::new(),
            attributes: BTreeMap::new(),
            directories: HashSet::new(),
        }
    }

    pub(super) fn create(root: &Path) -> Result<Tree, RootfsError> {
        let tree = Tree::new(root);
        for top in MERGED {
            tree.wrote(Path::new(top), fs::create_dir_all(root.join("usr").join(top)))?;
            tree.wrote(Path::new(top), symlink(format!("usr/{top}"), root.join(top)))?;
        }
        Ok(tree)
    }

    /// Creates an empty tree, into which entries are put as they are.
    pub(super) fn empty(root: &Path) -> Result<Tree, RootfsError> {
        let tree = Tree::new(root);
        tree.wrote(Path::new(""), fs::create_dir(root))?;
        tree.wrote(Path::new(""), fs::set_permissions(root, Permissions::from_mode(0o755)))?;
        Ok(tree)
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the host path of `inner`; valid only if its parents are not links.
    pub(super) fn path(&self, inner: &str) -> PathBuf {
        self.root.join(inner)
    }

    pub(super) fn has(&self, inner: &str) -> bool {
        fs::symlink_metadata(self.path(inner)).is_ok()
    }

    pub(super) fn meta(&self, inner: &Path) -> Meta {
        self.metas.get(inner).copied().unwrap_or_default()
    }

    pub(super) fn own(&mut self, inner: &str, uid: u32, gid: u32) {
        let meta = self.metas.entry(inner.into()).or_default();
        (meta.uid, meta.gid) = (uid, gid);
    }

    /// Returns the path in the image of a path on this host.
    pub(super) fn inside<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(&self.root).unwrap_or(path)
    }

    /// Sets the owner of a path on this host, which contains no links, for the image.
    pub(super) fn own_path(&mut self, path: &Path, uid: u32, gid: u32) {
        let mode = None;
        self.set_meta(path, Meta { uid, gid, mode });
    }

    pub(super) fn set_meta(&mut self, path: &Path, meta: Meta) {
        let inner = self.inside(path).to_owned();
        if meta == Meta::default() {
            self.metas.remove(&inner);
        } else {
            self.metas.insert(inner, meta);
        }
    }

    /// Sets the extended attributes of a path on this host, for the image.
    pub(super) fn set_attributes(&mut self, path: &Path, attributes: Vec<Attribute>) {
        let inner = self.inside(path).to_owned();
        if attributes.is_empty() {
            self.attributes.remove(&inner);
        } else {
            self.attributes.insert(inner, attributes);
        }
    }

    /// Returns the extended attributes of all paths.
    pub(super) fn attributes(&self) -> impl Iterator<Item = (&Path, &Attribute)> {
        self.attributes
            .iter()
            .flat_map(|(path, all)| all.iter().map(move |one| (path.as_path(), one)))
    }

    /// Removes a path on this host and everything below it, if it is there.
    pub(super) fn remove(&mut self, path: &Path) -> Result<(), RootfsError> {
        let inner = self.inside(path).to_owned();
        let removed = match fs::symlink_metadata(path) {
            Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
            _ => remove(path),
        };
        self.wrote(&inner, removed)?;
        let below = |known: &PathBuf| known.starts_with(&inner);
        let gone: Vec<_> = self
            .metas
            .range(inner.clone()..)
            .map(|it| it.0)
            .take_while(|it| below(it))
            .cloned()
            .collect();
        for path in gone {
            self.metas.remove(&path);
        }
        self.attributes.retain(|known, _| !below(known));
        self.directories.retain(|known| !below(known));
        Ok(())
    }

    /// Writes a file and its parent directories, replacing a package's file.
    pub(super) fn write(
        &mut self,
        inner: &str,
        content: impl AsRef<[u8]>,
        mode: u32,
    ) -> Result<(), RootfsError> {
        let path = self.place(Path::new(inner))?;
        self.wrote(Path::new(inner), remove(&path))?;
        self.wrote(Path::new(inner), fs::write(&path, content))?;
        self.set_mode(Path::new(inner), &path, mode, false)
    }

    pub(super) fn directory(&mut self, inner: &str, mode: u32) -> Result<(), RootfsError> {
        let path = self.resolve(Path::new(inner))?;
        self.wrote(Path::new(inner), fs::create_dir_all(&path))?;
        self.set_mode(Path::new(inner), &path, mode, true)
    }

    /// Creates a symbolic link, unless the path exists.
    pub(super) fn link(&self, inner: &str, target: &str) -> Result<(), RootfsError> {
        if self.has(inner) {
            return Ok(());
        }
        let path = self.path(inner);
        let parent = path.parent().unwrap_or(&self.root);
        self.wrote(Path::new(inner), fs::create_dir_all(parent))?;
        self.wrote(Path::new(inner), symlink(target, &path))
    }

    /// Unpacks one package.
    pub(super) fn unpack(&mut self, package: &Path) -> Result<(), RootfsError> {
        let failed = |source| RootfsError::ReadPackage { path: package.to_owned(), source };
        let mut files = deb::open(package, Part::Data)?;
        for entry in files.entries().map_err(failed)? {
            let mut entry = entry.map_err(failed)?;
            let path = entry.path().map_err(failed)?.into_owned();
            let inside = deb::inner_path(&path).ok_or_else(|| RootfsError::Escapes {
                path: package.to_owned(),
                entry: path.clone(),
            })?;
            let inner = merged(&inside);
            if inner.as_os_str().is_empty() || unwanted(&inner) {
                continue;
            }
            self.unpack_entry(&inner, &mut entry)
                .map_err(|source| RootfsError::Unpack { path: inner, source })??;
        }
        Ok(())
    }

    fn unpack_entry(
        &mut self,
        inner: &Path,
        entry: &mut tar::Entry<'_, Box<dyn io::Read>>,
    ) -> io::Result<Result<(), RootfsError>> {
        let header = entry.header();
        let (kind, mode) = (header.entry_type(), header.mode()? & 0o7777);
        let (uid, gid) = (header.uid()? as u32, header.gid()? as u32);
        let modified = UNIX_EPOCH + Duration::from_secs(header.mtime()?);
        let link = entry.link_name()?.map(|link| link.into_owned());
        if kind.is_dir() && self.directories.contains(inner) {
            return Ok(Ok(()));
        }
        let place = if kind.is_dir() { self.resolve(inner) } else { self.place(inner) };
        let path = match place {
            Ok(path) => path,
            Err(err) => return Ok(Err(err)),
        };
        match (kind, link) {
            (EntryType::Directory, _) => {
                fs::create_dir_all(&path)?;
                // Through a link the path is another one, which the host must not follow.
                if path == self.root.join(inner) {
                    self.directories.insert(inner.to_owned());
                }
            }
            (EntryType::Regular | EntryType::Continuous, _) => {
                remove(&path)?;
                let mut file = File::create_new(&path)?;
                io::copy(entry, &mut file)?;
                file.set_times(FileTimes::new().set_modified(modified))?;
            }
            (EntryType::Symlink, Some(target)) => {
                // If a package has a link where a directory exists, the directory stays.
                if !path.is_dir() {
                    remove(&path)?;
                    symlink(target, &path)?;
                }
                return Ok(Ok(()));
            }
            (EntryType::Link, Some(target)) => {
                let Some(target) = deb::inner_path(&target).map(|target| merged(&target)) else {
                    return Err(io::Error::other("the link leaves the root"));
                };
                remove(&path)?;
                fs::hard_link(self.root.join(&target), &path)?;
                let meta = self.meta(&target);
                self.metas.insert(inner.to_owned(), meta);
                return Ok(Ok(()));
            }
            // Devices and pipes: no package has any, and the guest's /dev is a mount.
            _ => return Ok(Ok(())),
        }
        if (uid, gid) != (0, 0) {
            self.metas.insert(inner.to_owned(), Meta { uid, gid, mode: None });
        }
        Ok(self.set_mode(inner, &path, mode, kind.is_dir()))
    }

    /// Sets the mode as far as possible: the builder must still be able to read and remove the
    /// file, and no program of another system gets set-id bits on this host.
    pub(super) fn set_mode(
        &mut self,
        inner: &Path,
        path: &Path,
        mode: u32,
        directory: bool,
    ) -> Result<(), RootfsError> {
        let on_disk = mode & 0o777 | if directory { 0o700 } else { 0o600 };
        if on_disk != mode {
            self.metas.entry(inner.to_owned()).or_default().mode = Some(mode);
        }
        self.wrote(inner, fs::set_permissions(path, Permissions::from_mode(on_disk)))
    }

    /// Returns the host path of `inner`, and creates its parents.
    pub(super) fn place(&mut self, inner: &Path) -> Result<PathBuf, RootfsError> {
        let parent = inner.parent().unwrap_or(Path::new(""));
        let name = inner.file_name().unwrap_or_default();
        if self.directories.contains(parent) {
            return Ok(self.root.join(inner));
        }
        let resolved = self.resolve(parent)?;
        self.wrote(inner, fs::create_dir_all(&resolved))?;
        Ok(resolved.join(name))
    }

    /// Resolves links as the guest would. The host must not follow them: an absolute link in the
    /// tree would lead to the host's own files.
    pub(super) fn resolve(&self, inner: &Path) -> Result<PathBuf, RootfsError> {
        let mut todo: Vec<_> = inner.iter().rev().map(|name| name.to_owned()).collect();
        let (mut at, mut links) = (PathBuf::new(), 0);
        while let Some(name) = todo.pop() {
            at.push(&name);
            let Ok(target) = fs::read_link(self.root.join(&at)) else { continue };
            links += 1;
            if links > LINKS_CAP {
                let source = io::Error::from_raw_os_error(libc::ELOOP);
                return Err(RootfsError::Unpack { path: inner.to_owned(), source });
            }
            at.pop();
            if target.is_absolute() {
                at.clear();
            }
            let mut names = Vec::new();
            for component in target.components() {
                match component {
                    Component::Normal(name) => names.push(name.to_owned()),
                    // The parent of the root is the root, as in a chroot.
                    Component::ParentDir if names.pop().is_none() => _ = at.pop(),
                    _ => (),
                }
            }
            todo.extend(names.into_iter().rev());
        }
        Ok(self.root.join(at))
    }

    fn wrote<T>(&self, inner: &Path, result: io::Result<T>) -> Result<T, RootfsError> {
        result.map_err(|source| RootfsError::Write { path: self.root.join(inner), source })
    }
}

/// Returns the usr-merged path: `bin/sh` becomes `usr/bin/sh`.
fn merged(inner: &Path) -> PathBuf {
    if MERGED.iter().any(|top| inner.starts_with(top)) {
        Path::new("usr").join(inner)
    } else {
        inner.to_owned()
    }
}

fn unwanted(inner: &Path) -> bool {
    UNWANTED.iter().any(|prefix| inner.starts_with(prefix))
        || inner.file_name().is_some_and(|name| name == PIP_REFUSAL)
}

pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(err) if err.kind() != io::ErrorKind::NotFound => Err(err),
        _ => Ok(()),
    }
}
