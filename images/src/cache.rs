//! The cache directory, which keeps kernels, templates and empty disks between runs.
//!
//! Every entry is made in one way: locked, built in a temporary directory, synced, renamed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::progress::Progress;
use crate::sys;

/// How long to wait for a lock; longer than any build, so a builder that holds it longer is stuck.
const LOCK_DEADLINE: Duration = Duration::from_secs(30 * 60);
const LOCK_POLL: Duration = Duration::from_millis(50);
/// The name prefix of a directory that is still being built.
const TEMP_PREFIX: &str = ".building-";

#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("no place for the cache: set HOME, or XDG_CACHE_HOME to an absolute directory")]
    NoHome,
    #[error("cannot create cache directory {}", path.display())]
    Create { path: PathBuf, source: io::Error },
    #[error("cannot lock {}", path.display())]
    Lock { path: PathBuf, source: io::Error },
    #[error("{} has been locked for {seconds} s: end the process that builds there, then retry", path.display())]
    Locked { path: PathBuf, seconds: u64 },
    #[error("{} has {free_mib} MiB free and {needed_mib} are needed: free some, or set XDG_CACHE_HOME", path.display())]
    Full { path: PathBuf, free_mib: u64, needed_mib: u64 },
    #[error("interrupted while waiting for {}", path.display())]
    Interrupted { path: PathBuf },
    #[error("cannot write {} to disk", path.display())]
    Sync { path: PathBuf, source: io::Error },
    #[error("cannot put {} in place", path.display())]
    Publish { path: PathBuf, source: io::Error },
    #[error("cannot remove {}", path.display())]
    Remove { path: PathBuf, source: io::Error },
}

/// The cache, by its root directory. All contents can be deleted at any time and are built again.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens `$XDG_CACHE_HOME/pvmm`, or `~/.cache/pvmm`.
    pub fn open() -> Result<Cache, CacheError> {
        let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let home = std::env::var_os("HOME").map(PathBuf::from);
        Cache::at(&root_from(xdg, home).ok_or(CacheError::NoHome)?)
    }

    /// Opens a cache at another path, for tests and embedders.
    pub fn at(root: &Path) -> Result<Cache, CacheError> {
        let cache = Cache { root: root.to_owned() };
        create_dir(&cache.root)?;
        Ok(cache)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of entry `name` of `kind`, whether or not it exists.
    pub fn path(&self, kind: &str, name: &str) -> PathBuf {
        self.root.join(kind).join(name)
    }

    /// Waits for the exclusive lock of `kind/name`, which is released when dropped or when the
    /// process dies.
    pub fn lock(
        &self,
        kind: &str,
        name: &str,
        progress: &mut dyn Progress,
    ) -> Result<Lock, CacheError> {
        self.lock_until(kind, name, LOCK_DEADLINE, progress)
    }

    fn lock_until(
        &self,
        kind: &str,
        name: &str,
        deadline: Duration,
        progress: &mut dyn Progress,
    ) -> Result<Lock, CacheError> {
        let dir = self.root.join("locks");
        create_dir(&dir)?;
        // Lock files stay: removing one would let two builders lock two different files.
        let path = dir.join(format!("{kind}-{name}.lock"));
        let failed = |source| CacheError::Lock { path: path.clone(), source };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        let end = Instant::now() + deadline;
        let mut told = false;
        while !sys::try_lock(&file).map_err(failed)? {
            if Instant::now() >= end {
                return Err(CacheError::Locked { path, seconds: deadline.as_secs() });
            }
            if progress.interrupted() {
                return Err(CacheError::Interrupted { path });
            }
            if !told {
                let holder = fs::read_to_string(&path).unwrap_or_default();
                progress.step(&format!("Waiting for process {} to build {name}", holder.trim()));
                told = true;
            }
            std::thread::sleep(LOCK_POLL);
        }
        if told {
            progress.done();
        }
        // The pid is only for the message of a waiting process, so a failure is ignored.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        Ok(Lock { _file: file })
    }

    /// Ensures that `kind/name` exists and `current` accepts it, building it if not.
    ///
    /// Two processes that need one entry build it once: the second waits and finds it. `build`
    /// fills an empty directory that no other process sees; an error or a crash leaves no entry.
    pub fn publish<E: From<CacheError>>(
        &self,
        kind: &str,
        name: &str,
        progress: &mut dyn Progress,
        current: impl FnOnce(&Path) -> bool,
        build: impl FnOnce(&Path, &mut dyn Progress) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        let path = self.path(kind, name);
        let _lock = self.lock(kind, name, progress)?;
        if current(&path) {
            return Ok(path);
        }
        let parent = self.root.join(kind);
        create_dir(&parent)?;
        sweep(&parent, name);
        let temp = Temp::create(&parent, name)?;
        build(temp.path(), progress)?;
        publish_folder(temp.path(), &path)?;
        Ok(path)
    }

    /// Fails early if the disk has too little space for a build.
    pub fn need_mib(&self, needed_mib: u64) -> Result<(), CacheError> {
        // If the filesystem cannot report its free space, the work is tried.
        let free_mib = sys::free_bytes(&self.root).map_or(u64::MAX, |bytes| bytes >> 20);
        if free_mib < needed_mib {
            return Err(CacheError::Full { path: self.root.clone(), free_mib, needed_mib });
        }
        Ok(())
    }

    /// Removes `kind/name`; returns false if it did not exist.
    pub fn remove(
        &self,
        kind: &str,
        name: &str,
        progress: &mut dyn Progress,
    ) -> Result<bool, CacheError> {
        let path = self.path(kind, name);
        let _lock = self.lock(kind, name, progress)?;
        if !path.exists() {
            return Ok(false);
        }
        // Renamed first, so that no reader finds a half-removed entry.
        let parent = self.root.join(kind);
        let failed = |source| CacheError::Remove { path: path.clone(), source };
        let temp = Temp::create(&parent, name)?;
        fs::rename(&path, temp.path().join("old")).map_err(failed)?;
        fs::remove_dir_all(temp.path()).map_err(failed)?;
        Ok(true)
    }
}

/// The exclusive lock of one entry, held until dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// A directory that is removed on drop, unless it was renamed.
struct Temp(PathBuf);

impl Temp {
    fn create(parent: &Path, name: &str) -> Result<Temp, CacheError> {
        let path = parent.join(format!("{TEMP_PREFIX}{name}.{}", std::process::id()));
        fs::create_dir(&path)
            .map_err(|source| CacheError::Create { path: path.clone(), source })?;
        Ok(Temp(path))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Computes a content key: hex SHA-256 over the parts, each with its length so that different
/// splits give different keys.
pub fn key<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex(&hash.finalize())
}

/// Returns the hex SHA-256 of a file.
pub fn file_digest(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = io::Read::read(&mut file, &mut buffer)?;
        if n == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&buffer[..n]);
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn root_from(xdg: Option<PathBuf>, home: Option<PathBuf>) -> Option<PathBuf> {
    // The XDG base directory specification requires relative paths to be ignored.
    let base = xdg.filter(|path| path.is_absolute());
    base.or_else(|| home.filter(|path| path.is_absolute()).map(|home| home.join(".cache")))
        .map(|base| base.join("pvmm"))
}

fn create_dir(path: &Path) -> Result<(), CacheError> {
    fs::create_dir_all(path).map_err(|source| CacheError::Create { path: path.to_owned(), source })
}

/// Removes what dead builders left behind. The lock of `name` is held, so its builder is gone; for
/// other names the process id in the directory's name shows whether the builder still runs.
fn sweep(parent: &Path, name: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let file_name = entry.file_name();
        let Some(rest) = file_name.to_str().and_then(|n| n.strip_prefix(TEMP_PREFIX)) else {
            continue;
        };
        let Some((of, pid)) = rest.rsplit_once('.') else { continue };
        if of == name || !Path::new("/proc").join(pid).exists() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn sync_tree(path: &Path) -> Result<(), CacheError> {
    let failed = |source| CacheError::Sync { path: path.to_owned(), source };
    for entry in fs::read_dir(path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let kind = entry.file_type().map_err(failed)?;
        if kind.is_dir() {
            sync_tree(&entry.path())?;
        } else if kind.is_file() {
            let path = entry.path();
            File::open(&path)
                .and_then(|file| file.sync_all())
                .map_err(|source| CacheError::Sync { path, source })?;
        }
    }
    sync_dir(path)
}

fn sync_dir(path: &Path) -> Result<(), CacheError> {
    File::open(path)
        .and_then(|dir| dir.sync_all())
        .map_err(|source| CacheError::Sync { path: path.to_owned(), source })
}

/// Syncs the folder `temp` and renames it to `path`, which it replaces as a whole.
pub fn publish_folder(temp: &Path, path: &Path) -> Result<(), CacheError> {
    sync_tree(temp)?;
    put_in_place(temp, path)?;
    sync_dir(path.parent().unwrap_or(path))
}

/// Renames `temp` to `path`. An existing entry is exchanged, so that readers see the old or the new
/// entry, never none; open files of the old entry stay valid.
fn put_in_place(temp: &Path, path: &Path) -> Result<(), CacheError> {
    let failed = |source| CacheError::Publish { path: path.to_owned(), source };
    if fs::symlink_metadata(path).is_err() {
        return fs::rename(temp, path).map_err(failed);
    }
    if sys::exchange(temp, path).is_err() {
        // On a filesystem without RENAME_EXCHANGE there is a moment without an entry.
        let old = temp.with_extension("old");
        fs::rename(path, &old).map_err(failed)?;
        fs::rename(temp, path).map_err(failed)?;
        fs::rename(&old, temp).map_err(failed)?;
    }
    fs::remove_dir_all(temp).map_err(|source| CacheError::Remove { path: temp.to_owned(), source })
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
