//! The directory of each VM: where it is, who may see it, whether its machine is alive.
//!
//! All that one pvmm command knows of a VM that another one started is in here, so there is no daemon to
//! ask and nothing to get out of step: a VM is alive exactly while its lock is held.
//!
//! | file | holds |
//! | --- | --- |
//! | `vm.json` | what it is: [`Record`] |
//! | `lock` | held by the VMM process for as long as it lives |
//! | `vsock.sock` | the way to its agent |
//! | `console.log`, `output.log` | what the guest and its main command printed |
//! | `outcome.json` | how it ended: [`Ending`] |

mod record;
#[cfg(test)]
mod tests;

pub use record::{Ending, Record, State, now};

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::exit::Failure;
use crate::sys::{lock, process};

/// The longest path that a Unix socket's address can hold.
const MAX_SOCKET_PATH: usize = 107;
/// What follows the base in the longest socket path: `/<id>/vsock.sock_<port>`.
const SOCKET_TAIL: usize = 1 + ID_LENGTH + "/vsock.sock_4294967295".len();
const ID_LENGTH: usize = 12;
/// How long to wait for another pvmm that is making or sweeping a directory.
const BASE_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum VmDirError {
    #[error("the runtime directory {path} is {length} bytes long, a socket leaves room for {max}")]
    TooLong { path: PathBuf, length: usize, max: usize },
    #[error("the runtime directory {0} is not an absolute path")]
    Relative(PathBuf),
    #[error("the runtime directory {path} {why}")]
    NotOurs { path: PathBuf, why: &'static str },
    #[error("--name: a VM named '{name}' exists already ({id})")]
    NameTaken { name: String, id: String },
    #[error("the runtime directory {0} has been locked by another pvmm for 10 s")]
    Busy(PathBuf),
    #[error("no VM is called '{0}'")]
    Unknown(String),
    #[error("'{reference}' is the start of {count} ids")]
    Ambiguous { reference: String, count: usize },
    #[error("cannot {act} {path}: {source}")]
    Io { act: &'static str, path: PathBuf, source: io::Error },
}

impl From<VmDirError> for Failure {
    fn from(error: VmDirError) -> Self {
        let message = error.to_string();
        let usage = Failure::usage(&message);
        match error {
            VmDirError::TooLong { .. } | VmDirError::Relative(_) => {
                usage.hint("set PVMM_RUNTIME_DIR to a short absolute path, such as /tmp/pvmm")
            }
            VmDirError::NotOurs { .. } => {
                usage.hint("remove it, or set PVMM_RUNTIME_DIR to a directory of your own")
            }
            VmDirError::NameTaken { name, .. } => {
                usage.hint(format!("choose another name, or remove it with 'pvmm rm -f {name}'"))
            }
            VmDirError::Unknown(_) => usage.hint("'pvmm ps' lists the VMs there are"),
            VmDirError::Ambiguous { .. } => usage.hint("write more of the id"),
            VmDirError::Busy(_) | VmDirError::Io { .. } => Failure::fault(message),
        }
    }
}

fn at(act: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VmDirError {
    let path = path.to_owned();
    move |source| VmDirError::Io { act, path, source }
}

/// Whether `text` has the shape of an id.
pub fn is_id(text: &str) -> bool {
    text.len() == ID_LENGTH && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// The directory that holds the VMs' directories.
#[derive(Clone, Debug)]
pub struct Base {
    path: PathBuf,
}

impl Base {
    /// The user's base directory, made if needed; refused if anyone else could look into it.
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
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(at("make the runtime directory", &path)(error)),
        }
        // In a shared /tmp somebody else may have been first: a link or a directory that is not ours
        // would hand them the sockets.
        let metadata = fs::symlink_metadata(&path).map_err(at("look at", &path))?;
        let not_ours = |why| Err(VmDirError::NotOurs { path: path.clone(), why });
        match () {
            () if !metadata.is_dir() => not_ours("is not a directory"),
            () if metadata.uid() != process::effective_uid() => not_ours("belongs to another user"),
            () if metadata.permissions().mode() & 0o077 != 0 => {
                not_ours("is open to other users; it needs mode 0700")
            }
            () => Ok(Self { path }),
        }
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
        let mut claim = Claim { dir: VmDir { path }, lock: None };
        let lock = claim.dir.open_lock().map_err(at("lock", &claim.dir.path))?;
        lock::try_exclusive(&lock).map_err(at("lock", &claim.dir.path))?;
        claim.lock = Some(lock);
        claim.dir.write_record(&record)?;
        Ok(claim)
    }

    /// Every VM there is, newest last; what dead foreground runs left behind goes first.
    pub fn list(&self) -> Result<Vec<Entry>, VmDirError> {
        if self.entries()?.iter().any(Entry::is_left_over) {
            let _base = self.lock()?;
            self.sweep_locked();
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
    fn lock(&self) -> Result<File, VmDirError> {
        let path = self.path.join("lock");
        let file = open_private(&path).map_err(at("open", &path))?;
        match lock::exclusive(&file, BASE_PATIENCE).map_err(at("lock", &path))? {
            true => Ok(file),
            false => Err(VmDirError::Busy(self.path.clone())),
        }
    }

    fn entries(&self) -> Result<Vec<Entry>, VmDirError> {
        let mut entries = Vec::new();
        for dir in fs::read_dir(&self.path).map_err(at("read", &self.path))? {
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

/// One VM as another command sees it.
#[derive(Debug)]
pub struct Entry {
    pub dir: VmDir,
    pub record: Record,
    pub state: State,
}

impl Entry {
    fn read(id: &str, dir: VmDir) -> Self {
        let alive = dir.is_alive();
        let record = dir.read_record();
        let state = match (&record, alive) {
            (Some(record), true) if record.ready => State::Running,
            (_, true) => State::Starting,
            (_, false) => dir.read_ending().map_or(State::Dead, State::Exited),
        };
        // Without a record the maker died half-way: ephemeral, so that it is swept.
        let mut record = record.unwrap_or_else(|| Record { ephemeral: true, ..Record::default() });
        record.id = id.to_owned();
        Self { dir, record, state }
    }

    fn is_left_over(&self) -> bool {
        self.record.ephemeral && !self.state.is_alive()
    }
}

/// One VM's directory.
#[derive(Clone, Debug)]
pub struct VmDir {
    path: PathBuf,
}

impl VmDir {
    pub fn vsock(&self) -> PathBuf {
        self.path.join("vsock.sock")
    }

    pub fn console_log(&self) -> PathBuf {
        self.path.join("console.log")
    }

    pub fn output_log(&self) -> PathBuf {
        self.path.join("output.log")
    }

    /// What the VMM process itself says.
    pub fn vmm_log(&self) -> PathBuf {
        self.path.join("vmm.log")
    }

    /// Whether a process holds the lock.
    pub fn is_alive(&self) -> bool {
        let Ok(file) = File::open(self.path.join("lock")) else { return false };
        // A lock that cannot be asked about is taken as held: better to keep a directory than to lose one.
        !lock::is_free(&file).unwrap_or(false)
    }

    /// Waits until no process holds the lock.
    pub fn wait_for_end(&self, patience: Duration) -> Result<bool, VmDirError> {
        match File::open(self.path.join("lock")) {
            Ok(file) => lock::exclusive(&file, patience).map_err(at("lock", &self.path)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
            Err(error) => Err(at("open the lock of", &self.path)(error)),
        }
    }

    pub fn write_record(&self, record: &Record) -> Result<(), VmDirError> {
        record::write(&self.path.join("vm.json"), record).map_err(at("write", &self.path))
    }

    pub fn read_record(&self) -> Option<Record> {
        record::read(&self.path.join("vm.json"))
    }

    pub fn write_ending(&self, ending: &Ending) -> Result<(), VmDirError> {
        record::write(&self.path.join("outcome.json"), ending).map_err(at("write", &self.path))
    }

    pub fn read_ending(&self) -> Option<Ending> {
        record::read(&self.path.join("outcome.json"))
    }

    /// Removes the directory; one that is gone already is no error.
    pub fn remove(&self) -> Result<(), VmDirError> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(at("remove", &self.path)(error))
            }
            _ => Ok(()),
        }
    }

    fn open_lock(&self) -> io::Result<File> {
        open_private(&self.path.join("lock"))
    }
}

/// A new VM's directory, in the hands of its maker: removed when dropped, unless kept.
#[derive(Debug)]
pub struct Claim {
    dir: VmDir,
    lock: Option<File>,
}

impl Claim {
    pub fn dir(&self) -> &VmDir {
        &self.dir
    }

    /// Leaves the directory to the VMM process, which has its own copy of the lock.
    pub fn keep(mut self) -> VmDir {
        self.lock = None;
        let dir = self.dir.clone();
        std::mem::forget(self);
        dir
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // What cannot be removed now is swept by the next command.
        let _ = self.dir.remove();
    }
}

/// Opens or makes a file that only its owner can read.
pub fn open_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}
