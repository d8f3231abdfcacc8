//! The directory that holds the VMs' directories: found, guarded, searched, swept.
//!
//! Apart from a single VM's directory because this is about all of them: unique names, and what dead
//! processes left.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Claim, Entry, ID_LENGTH, Record, VmDir, VmDirError, at, is_id};
use crate::sys::{lock, process};

/// The longest path that a Unix socket's address can hold.
const MAX_SOCKET_PATH: usize = 107;
/// What follows the base in the longest socket path: `/<id>/vsock.sock_<port>`.
const SOCKET_TAIL: usize = 1 + ID_LENGTH + "/vsock.sock_4294967295".len();
/// How long to wait for another pvmm that is making or sweeping a directory.
const BASE_PATIENCE: Duration = Duration::from_secs(10);

/// The directory that holds the VMs' directories.
#[derive(Clone, Debug)]
pub struct Base {
    path: PathBuf,
}

impl Base {
    /// The user's base directory; refused if anyone else could look into it.
    pub fn open() -> Result<Self, VmDirError> {
        Self::at(Self::default_path())
    }

    fn default_path() -> PathBuf {
        let set =
            |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(path) = set("PVMM_RUNTIME_DIR") {
            return path;
        }
        if let Some(path) = set("XDG_RUNTIME_DIR").filter(|path| path.is_dir()) {
            return path.join("pvmm");
        }
        match process::effective_uid() {
            0 if Path::new("/run").is_dir() => PathBuf::from("/run/pvmm"),
            uid => std::env::temp_dir().join(format!("pvmm-{uid}")),
        }
    }

    /// The same for a given path.
    pub fn at(path: PathBuf) -> Result<Self, VmDirError> {
        if !path.is_absolute() {
            return Err(VmDirError::Relative(path));
        }
        let (length, max) = (path.as_os_str().len(), MAX_SOCKET_PATH - SOCKET_TAIL);
        if length > max {
            return Err(VmDirError::TooLong { path, length, max });
        }
        let base = Self { path };
        base.check()?;
        Ok(base)
    }

    /// The base that a VM's directory is in.
    pub(super) fn around(dir: &Path) -> Self {
        Self { path: dir.parent().unwrap_or(dir).to_owned() }
    }

    /// In a shared /tmp somebody else may have been first: a link or a directory that is not ours would
    /// hand them the sockets.
    fn check(&self) -> Result<(), VmDirError> {
        let metadata = match fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            metadata => metadata.map_err(at("look at", &self.path))?,
        };
        let not_ours = |why| Err(VmDirError::NotOurs { path: self.path.clone(), why });
        match () {
            () if !metadata.is_dir() => not_ours("is not a directory"),
            () if metadata.uid() != process::effective_uid() => not_ours("belongs to another user"),
            () if metadata.permissions().mode() & 0o077 != 0 => {
                not_ours("is open to other users; it needs mode 0700")
            }
            () => Ok(()),
        }
    }

    /// Makes the directory and, if it stays empty, removes it again.
    pub fn try_out(&self) -> Result<(), VmDirError> {
        let _base = self.lock()?;
        self.leave_locked();
        Ok(())
    }

    /// Removes the base if no VM is left. Nothing is lost if somebody else is at it: they stay.
    pub fn leave(&self) {
        if let Ok(file) = File::open(&self.path)
            && lock::try_exclusive(&file).unwrap_or(false)
        {
            self.leave_locked();
        }
    }

    fn leave_locked(&self) {
        // Refused by the kernel unless it is empty, which is all the check there needs to be.
        let _ = fs::remove_dir(&self.path);
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a directory for a new VM and holds its lock; refuses a name that is taken.
    pub fn create(&self, mut record: Record) -> Result<Claim, VmDirError> {
        let _base = self.lock()?;
        self.sweep_locked();
        if let Some(name) = &record.name {
            let taken =
                self.entries()?.into_iter().find(|vm| vm.record.name.as_ref() == Some(name));
            if let Some(vm) = taken {
                return Err(VmDirError::NameTaken { name: name.clone(), id: vm.record.id });
            }
        }
        let random: [u8; ID_LENGTH / 2] =
            process::random().map_err(at("draw an id for", &self.path))?;
        record.id = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = self.path.join(&record.id);
        DirBuilder::new().mode(0o700).create(&path).map_err(at("make", &path))?;
        let mut claim = Claim { dir: VmDir { path }, base: self.clone(), lock: None, kept: false };
        let lock = claim.dir.open_lock().map_err(at("lock", &claim.dir.path))?;
        lock::try_exclusive(&lock).map_err(at("lock", &claim.dir.path))?;
        claim.lock = Some(lock);
        claim.dir.write_record(&record)?;
        Ok(claim)
    }

    /// Refuses a name that a VM has; `create` asks again when nobody can come between.
    pub fn refuse_taken(&self, name: &str) -> Result<(), VmDirError> {
        let has_it = |vm: &Entry| vm.record.name.as_deref() == Some(name) && !vm.is_left_over();
        match self.entries()?.into_iter().find(has_it) {
            Some(vm) => Err(VmDirError::NameTaken { name: name.to_owned(), id: vm.record.id }),
            None => Ok(()),
        }
    }

    /// Removes a VM that has ended.
    pub fn discard(&self, vm: &Entry) -> Result<(), VmDirError> {
        vm.dir.remove()?;
        self.leave();
        Ok(())
    }

    /// Every VM there is, newest last; what dead foreground runs left behind goes first.
    pub fn list(&self) -> Result<Vec<Entry>, VmDirError> {
        if self.entries()?.iter().any(Entry::is_left_over) {
            let _base = self.lock()?;
            self.sweep_locked();
            self.leave_locked();
        }
        let mut entries = self.entries()?;
        entries.sort_by(|a, b| {
            (a.record.created, &a.record.id).cmp(&(b.record.created, &b.record.id))
        });
        Ok(entries)
    }

    /// The VM with this id, name, or start of an id.
    pub fn find(&self, reference: &str) -> Result<Entry, VmDirError> {
        let mut entries = self.list()?;
        let exact =
            |vm: &Entry| vm.record.id == reference || vm.record.name.as_deref() == Some(reference);
        if let Some(found) = entries.iter().position(exact) {
            return Ok(entries.swap_remove(found));
        }
        entries.retain(|vm| !reference.is_empty() && vm.record.id.starts_with(reference));
        match entries.len() {
            0 => Err(VmDirError::Unknown(reference.to_owned())),
            1 => Ok(entries.swap_remove(0)),
            count => Err(VmDirError::Ambiguous { reference: reference.to_owned(), count }),
        }
    }

    /// Held while a directory is made or swept, so that names are unique and nothing half-made is swept.
    ///
    /// The lock is on the directory itself: no file is left when the last VM is gone.
    fn lock(&self) -> Result<File, VmDirError> {
        let failed = |error| at("lock", &self.path)(error);
        let deadline = Instant::now() + BASE_PATIENCE;
        while let left = deadline.saturating_duration_since(Instant::now())
            && !left.is_zero()
        {
            match DirBuilder::new().mode(0o700).create(&self.path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.check()?,
                Err(error) => return Err(at("make", &self.path)(error)),
            }
            let file = match File::open(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                file => file.map_err(failed)?,
            };
            if !lock::exclusive(&file, left).map_err(failed)? {
                break;
            }
            // Another pvmm may have removed it, empty, while this one waited.
            let inode = file.metadata().map_err(failed)?.ino();
            if fs::metadata(&self.path).is_ok_and(|now| now.ino() == inode) {
                return Ok(file);
            }
        }
        Err(VmDirError::Busy(self.path.clone()))
    }

    fn entries(&self) -> Result<Vec<Entry>, VmDirError> {
        let mut entries = Vec::new();
        let dirs = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(entries),
            dirs => dirs.map_err(at("read", &self.path))?,
        };
        for dir in dirs {
            let dir = dir.map_err(at("read", &self.path))?;
            if let Some(id) = dir.file_name().to_str().filter(|name| is_id(name)) {
                entries.push(Entry::read(id, VmDir { path: self.path.join(id) }));
            }
        }
        Ok(entries)
    }

    /// Removes what no process owns any more. What cannot be removed now is tried again next time.
    fn sweep_locked(&self) {
        for left_over in self.entries().unwrap_or_default().iter().filter(|vm| vm.is_left_over()) {
            let _ = left_over.dir.remove();
        }
    }
}
