//! The base directory that holds one directory per VM: creating, checking, searching and sweeping
//! it.
//!
//! Separate from a single VM's directory, because unique names and the leftovers of dead processes
//! concern all VMs.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Claim, ID_LENGTH, Record, UidRange, VmDir, VmDirError, VmEntry, at, is_id};
use crate::sys::lock::{self, Guard};
use crate::sys::process;

/// The longest path that fits in the address of a Unix socket.
const MAX_SOCKET_PATH: usize = 107;
/// The longest part of a socket path after the base: `/<id>/run/vsock.sock_<port>`.
const SOCKET_TAIL: usize = 1 + ID_LENGTH + "/run/vsock.sock_4294967295".len();
/// How long to wait for another `pvmm` process that creates or sweeps directories.
const BASE_PATIENCE: Duration = Duration::from_secs(10);

/// The base directory, which holds one directory per VM.
#[derive(Clone, Debug)]
pub struct Base {
    path: PathBuf,
}

impl Base {
    /// Opens the user's base directory; refused if anyone else could access it.
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

    /// Opens the base directory at `path`, which must be absolute and short enough for a socket
    /// path.
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

    /// Returns the base that contains a VM's directory.
    pub(super) fn around(dir: &Path) -> Self {
        Self { path: dir.parent().unwrap_or(dir).to_owned() }
    }

    /// Refuses a link, or a directory of another user: in a shared /tmp someone else may have
    /// created it first, and would get access to the sockets.
    fn check(&self) -> Result<(), VmDirError> {
        let metadata = match fs::symlink_metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            metadata => metadata.map_err(at("look at", &self.path))?,
        };
        let not_ours = |why| Err(VmDirError::NotOurs { path: self.path.clone(), why });
        if !metadata.is_dir() {
            not_ours("is not a directory")
        } else if metadata.uid() != process::effective_uid() {
            not_ours("belongs to another user")
        } else if metadata.permissions().mode() & 0o077 != 0 {
            not_ours("is open to other users; it needs mode 0700")
        } else {
            Ok(())
        }
    }

    /// Checks that the directory can be created; removes it again if it is empty.
    pub fn try_out(&self) -> Result<(), VmDirError> {
        let _base = self.lock()?;
        self.leave_locked();
        Ok(())
    }

    /// Removes the base if no VM is left. Does nothing if another process holds its lock.
    pub fn leave(&self) {
        if let Ok(file) = File::open(&self.path)
            && lock::try_exclusive(&file).unwrap_or(false)
        {
            self.leave_locked();
        }
    }

    fn leave_locked(&self) {
        // The kernel refuses unless the directory is empty, so no further check is needed.
        let _ = fs::remove_dir(&self.path);
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the directory of a new VM and takes its lock; refuses a name that is taken. With
    /// `users` the VM gets one of them for its own.
    pub fn create(
        &self,
        mut record: Record,
        users: Option<&UidRange>,
    ) -> Result<Claim, VmDirError> {
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
        let run = claim.dir.run();
        DirBuilder::new().mode(0o700).create(run.path()).map_err(at("make", run.path()))?;
        if let Some(users) = users {
            let user = self.free_user(users)?;
            record.user = Some(user);
            chown(run.path(), Some(user), Some(user)).map_err(at("give away", run.path()))?;
        }
        claim.dir.write_record(&record)?;
        Ok(claim)
    }

    /// Picks a user that no VM here has. VMs of other base directories may have it; the range is
    /// large, and the pick is random.
    pub(super) fn free_user(&self, users: &UidRange) -> Result<u32, VmDirError> {
        let taken: Vec<_> = self.entries()?.iter().filter_map(|vm| vm.record.user).collect();
        let random: [u8; 4] = process::random().map_err(at("draw a user for", &self.path))?;
        let (first, count) = (*users.0.start(), users.0.end() - users.0.start() + 1);
        let start = u32::from_ne_bytes(random) % count;
        let mut users = (0..count).map(|step| first + (start + step) % count);
        users.find(|user| !taken.contains(user)).ok_or(VmDirError::NoUser)
    }

    /// Refuses a name that is taken. Only an early check: `create` repeats it under the lock.
    pub fn refuse_taken(&self, name: &str) -> Result<(), VmDirError> {
        let has_it = |vm: &VmEntry| vm.record.name.as_deref() == Some(name) && !vm.is_left_over();
        match self.entries()?.into_iter().find(has_it) {
            Some(vm) => Err(VmDirError::NameTaken { name: name.to_owned(), id: vm.record.id }),
            None => Ok(()),
        }
    }

    /// Removes the directory of a VM that has ended.
    pub fn discard(&self, vm: &VmEntry) -> Result<(), VmDirError> {
        vm.dir.remove()?;
        self.leave();
        Ok(())
    }

    /// Lists all VMs, newest last, after sweeping what dead foreground runs left behind.
    pub fn list(&self) -> Result<Vec<VmEntry>, VmDirError> {
        if self.entries()?.iter().any(VmEntry::is_left_over) {
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

    /// Finds a VM by its id, its name, or a unique prefix of its id.
    pub fn find(&self, reference: &str) -> Result<VmEntry, VmDirError> {
        let mut entries = self.list()?;
        let exact = |vm: &VmEntry| {
            vm.record.id == reference || vm.record.name.as_deref() == Some(reference)
        };
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

    /// Locks the base while directories are created or swept, so that names are unique and no
    /// half-made directory is swept.
    ///
    /// The lock is on the directory itself, so no file is left when the last VM is gone.
    fn lock(&self) -> Result<Guard, VmDirError> {
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
            // Another process may have removed the empty directory while this one waited.
            let inode = file.metadata().map_err(failed)?.ino();
            if fs::metadata(&self.path).is_ok_and(|now| now.ino() == inode) {
                return Ok(Guard::of(file));
            }
        }
        Err(VmDirError::Busy(self.path.clone()))
    }

    fn entries(&self) -> Result<Vec<VmEntry>, VmDirError> {
        let mut entries = Vec::new();
        let dirs = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(entries),
            dirs => dirs.map_err(at("read", &self.path))?,
        };
        for dir in dirs {
            let dir = dir.map_err(at("read", &self.path))?;
            if let Some(id) = dir.file_name().to_str().filter(|name| is_id(name)) {
                entries.push(VmEntry::read(id, VmDir { path: self.path.join(id) }));
            }
        }
        Ok(entries)
    }

    /// Removes directories that no process owns. What cannot be removed is tried again next time.
    fn sweep_locked(&self) {
        for left_over in self.entries().unwrap_or_default().iter().filter(|vm| vm.is_left_over()) {
            let _ = left_over.dir.remove();
        }
    }
}
