//! The directory of each VM: its files, its permissions, and whether the VM is alive.
//!
//! Everything that one `pvmm` command knows of a VM started by another is in this directory, so
//! there is no daemon, and no state that could get out of step: a VM is alive exactly while its
//! lock is held.
//!
//! | file | holds |
//! | --- | --- |
//! | `vm.json` | the VM's description: [`Record`] |
//! | `lock` | held by supervisor and monitor process for as long as they live |
//! | `outcome.json` | how the VM ended: [`Ending`] |
//! | `ttl.json` | when the VM ends, if that was changed while it ran: [`Ttl`] |
//! | `vmm.log` | messages of the monitor process |
//! | `egress.json`, `.sock`, `.log` | policy, control socket and log of the VM's egress process |
//! | `secrets.json` | values of the VM's secrets; only its egress process gets them |
//! | `vsock.sock` | a link to the vsock socket, if it was asked for elsewhere |
//! | `run/` | the files of the monitor process, [`RunDir`]: all that it can reach in its jail |
//! | `run/vsock.sock` | the socket of the guest's vsock device, through which the agent is reached |
//! | `run/control.sock` | the control socket of the monitor process |
//! | `run/console.log`, `run/output.log` | output of the guest's console and of its main command |
//!
//! The monitor process is not trusted: nothing in `run/` decides which process is signalled or
//! which file is opened, and no link in it is followed.

mod base;
mod record;
#[cfg(test)]
mod tests;

pub use base::Base;
pub use record::{
    Egress, Ending, Record, Ttl, VmStatus, VolumeMount, now, now_ms, read as read_document,
    write as write_document,
};

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pvmm_jailer::group::Group;

use crate::failure::{Failure, FailureKind};
use crate::sys::lock;

const ID_LENGTH: usize = 12;
const MAX_NAME: usize = 63;

#[derive(Debug, thiserror::Error)]
pub enum VmDirError {
    #[error("the runtime directory {} is {length} bytes long, a socket leaves room for {max}", path.display())]
    TooLong { path: PathBuf, length: usize, max: usize },
    #[error("the runtime directory {} is not an absolute path", .0.display())]
    Relative(PathBuf),
    #[error("the runtime directory {} {why}", path.display())]
    NotOurs { path: PathBuf, why: &'static str },
    #[error("--name: a VM named '{name}' exists already ({id})")]
    NameTaken { name: String, id: String },
    #[error("the runtime directory {} has been locked by another pvmm for 10 s", .0.display())]
    Busy(PathBuf),
    #[error("every user of the range belongs to a VM already")]
    NoUser,
    #[error("no VM is called '{0}'")]
    Unknown(String),
    #[error("'{reference}' is the start of {count} ids")]
    Ambiguous { reference: String, count: usize },
    #[error("'{name}' is {state}, not running")]
    NotRunning { name: String, state: &'static str },
    #[error("cannot {act} {}: {}", path.display(), crate::failure::io_text(source))]
    Io { act: &'static str, path: PathBuf, source: io::Error },
}

impl From<VmDirError> for Failure {
    fn from(error: VmDirError) -> Self {
        let message = error.to_string();
        let usage = match &error {
            VmDirError::Unknown(_) => Failure::usage(&message).of_kind(FailureKind::NotFound),
            VmDirError::NameTaken { .. } | VmDirError::NotRunning { .. } => {
                Failure::usage(&message).of_kind(FailureKind::Conflict)
            }
            _ => Failure::usage(&message),
        };
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
            VmDirError::NoUser => usage.hint("give a larger --uid-range, or end some VMs"),
            VmDirError::Unknown(_) => usage.hint("'pvmm ps' lists the VMs there are"),
            VmDirError::NotRunning { .. } => usage.hint("'pvmm ps' shows the state of each VM"),
            VmDirError::Ambiguous { .. } => usage.hint("write more of the id"),
            VmDirError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Failure::fault(message).of_kind(FailureKind::DiskFull)
            }
            VmDirError::Busy(_) | VmDirError::Io { .. } => Failure::fault(message),
        }
    }
}

fn at(act: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VmDirError {
    let path = path.to_owned();
    move |source| VmDirError::Io { act, path, source }
}

/// Numbers of users, none of them root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UidRange(pub RangeInclusive<u32>);

/// Parses a range of users, `FIRST-LAST`.
pub fn uid_range(text: &str) -> Result<UidRange, String> {
    let ends = text.split_once('-').and_then(|(first, last)| {
        Some((first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?))
    });
    match ends {
        // The largest number means "no user".
        Some((first, last)) if 0 < first && first <= last && last < u32::MAX => {
            Ok(UidRange(first..=last))
        }
        _ => Err("use two numbers from 1 on, as in 100000-165535".to_owned()),
    }
}

/// Whether `text` has the form of an id.
pub fn is_id(text: &str) -> bool {
    text.len() == ID_LENGTH && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Checks the name of a VM or snapshot: text that is valid as a path, a host name and a table cell.
pub fn check_name(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let starts_well = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    if !starts_well || text.len() > MAX_NAME || !text.chars().all(allowed) {
        return Err(format!(
            "use 1 to {MAX_NAME} letters, digits, '-', '_' or '.', starting with a letter or digit"
        ));
    }
    if is_id(text) {
        return Err("12 hexadecimal digits would be read as an id; choose another name".to_owned());
    }
    Ok(text.to_owned())
}

/// A VM as other commands see it.
#[derive(Debug)]
pub struct VmEntry {
    pub dir: VmDir,
    pub record: Record,
    pub state: VmStatus,
}

impl VmEntry {
    fn read(id: &str, dir: VmDir) -> Self {
        let alive = dir.is_alive();
        let record = dir.read_record();
        let state = match (&record, alive) {
            (Some(record), true) if record.paused => VmStatus::Paused,
            (Some(record), true) if record.ready => VmStatus::Running,
            (_, true) => VmStatus::Starting,
            (_, false) => dir.read_ending().map_or(VmStatus::Dead, VmStatus::Exited),
        };
        // Without a record the creator died half-way: marked ephemeral, so that it is swept.
        let mut record = record.unwrap_or_else(|| Record { ephemeral: true, ..Record::default() });
        record.id = id.to_owned();
        Self { dir, record, state }
    }

    /// Returns the VM's name, or its id if it has none.
    pub fn label(&self) -> &str {
        self.record.name.as_deref().unwrap_or(&self.record.id)
    }

    /// Whether the VM has a network card with a policy.
    pub fn has_egress(&self) -> bool {
        self.dir.egress_socket().exists()
    }

    /// Refuses a VM that is not running.
    pub fn require_running(&self) -> Result<(), VmDirError> {
        match self.state {
            VmStatus::Running => Ok(()),
            _ => {
                let (name, state) = (self.label().to_owned(), self.state.word());
                Err(VmDirError::NotRunning { name, state })
            }
        }
    }

    fn is_left_over(&self) -> bool {
        self.record.ephemeral && !self.state.is_alive()
    }
}

/// The directory of one VM.
#[derive(Clone, Debug)]
pub struct VmDir {
    path: PathBuf,
}

impl VmDir {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the folder of the monitor process.
    pub fn run(&self) -> RunDir {
        RunDir { path: self.path.join("run") }
    }

    /// Returns the path at which other programs find the vsock socket.
    pub fn shown_vsock(&self) -> PathBuf {
        fs::read_link(self.path.join("vsock.sock")).unwrap_or_else(|_| self.run().vsock())
    }

    /// Leads clients that ask for the vsock socket at `path` to this VM, and this VM's clients to
    /// `path`.
    pub fn show_vsock_at(&self, path: &Path) -> Result<(), VmDirError> {
        symlink(self.run().vsock(), path).map_err(at("make the socket", path))?;
        symlink(path, self.path.join("vsock.sock")).map_err(at("make a link in", &self.path))
    }

    /// Returns the path of the control socket of the VM's egress process.
    pub fn egress_socket(&self) -> PathBuf {
        self.path.join("egress.sock")
    }

    /// Returns the path of the log of what the guest reached and was denied.
    pub fn egress_log(&self) -> PathBuf {
        self.path.join("egress.log")
    }

    /// Returns the path of the values of the VM's secrets.
    pub fn secrets(&self) -> PathBuf {
        self.path.join("secrets.json")
    }

    /// Returns the network of the VM; `None` if it has none, or one on a tap.
    pub fn read_egress(&self) -> Option<Egress> {
        record::read(&self.path.join("egress.json"))
    }

    pub fn write_egress(&self, egress: &Egress) -> Result<(), VmDirError> {
        record::write(&self.path.join("egress.json"), egress).map_err(at("write", &self.path))
    }

    /// Sets how long the VM may live from now on, for its supervisor.
    pub fn write_ttl(&self, ttl: Option<Duration>) -> Result<(), VmDirError> {
        let ends_at = ttl.map(|ttl| now() + ttl.as_secs());
        record::write(&self.path.join("ttl.json"), &Ttl { ends_at })
            .map_err(at("write", &self.path))
    }

    /// Returns the time to live that was set last, if it was set while the VM ran.
    pub fn read_ttl(&self) -> Option<Ttl> {
        record::read(&self.path.join("ttl.json"))
    }

    /// Returns the path of the monitor process's own log.
    pub fn vmm_log(&self) -> PathBuf {
        self.path.join("vmm.log")
    }

    /// Removes the sockets of a VM that has ended, so that no client tries to connect, and the
    /// values of its secrets.
    pub fn remove_sockets(&self) {
        self.remove_shown_vsock();
        let _ = fs::remove_file(self.egress_socket());
        let _ = fs::remove_file(self.secrets());
        for entry in fs::read_dir(self.run().path).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.as_encoded_bytes();
            if name.starts_with(b"vsock.sock") || name == b"control.sock" {
                // On failure they are removed with the directory later.
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Removes the link at the place where the vsock socket was asked for, if it is still ours.
    fn remove_shown_vsock(&self) {
        let link = self.path.join("vsock.sock");
        if let Ok(shown) = fs::read_link(&link)
            && fs::read_link(&shown).is_ok_and(|target| target == self.run().vsock())
        {
            let _ = fs::remove_file(shown);
        }
        let _ = fs::remove_file(link);
    }

    /// Whether a process holds the lock.
    pub fn is_alive(&self) -> bool {
        let Ok(file) = File::open(self.path.join("lock")) else { return false };
        // If the lock cannot be queried it counts as held: keeping a directory is safer than losing
        // one.
        !lock::is_free(&file).unwrap_or(false)
    }

    /// Waits until no process holds the lock; returns false if `patience` runs out.
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

    /// Removes the directory; succeeds if it is already gone.
    pub fn remove(&self) -> Result<(), VmDirError> {
        self.remove_shown_vsock();
        if let Some(group) = self.path.file_name().and_then(|id| Group::named(id.to_str()?)) {
            // There is one only if the supervisor was killed.
            group.remove();
        }
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

/// The folder of a VM's monitor process: its sockets and the logs that it writes.
#[derive(Clone, Debug)]
pub struct RunDir {
    path: PathBuf,
}

impl RunDir {
    /// The folder at the path at which the process sees it.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn vsock(&self) -> PathBuf {
        self.path.join("vsock.sock")
    }

    /// Returns the path of the control socket.
    pub fn control(&self) -> PathBuf {
        self.path.join("control.sock")
    }

    pub fn console_log(&self) -> PathBuf {
        self.path.join("console.log")
    }

    pub fn output_log(&self) -> PathBuf {
        self.path.join("output.log")
    }
}

/// A new VM's directory while its creator owns it: removed on drop, unless kept.
#[derive(Debug)]
pub struct Claim {
    dir: VmDir,
    base: Base,
    lock: Option<File>,
    kept: bool,
}

impl Claim {
    /// Takes over the directory in the monitor process, which got the lock from its creator.
    pub fn adopt(path: PathBuf, lock: File) -> Self {
        let base = Base::around(&path);
        Self { dir: VmDir { path }, base, lock: Some(lock), kept: true }
    }

    /// Duplicates the lock's file descriptor, for the monitor process to hold.
    pub fn lock(&self) -> io::Result<OwnedFd> {
        let lock = self.lock.as_ref().ok_or(io::ErrorKind::NotFound)?;
        Ok(lock.try_clone()?.into())
    }

    pub fn dir(&self) -> &VmDir {
        &self.dir
    }

    pub fn base(&self) -> &Base {
        &self.base
    }

    /// Closes this process's copy of the lock, so that only the monitor process holds it. Otherwise
    /// a process forked later would inherit it, and the VM would appear alive for as long as that
    /// one lives.
    pub fn hand_over_lock(&mut self) {
        self.lock = None;
    }

    /// Keeps the directory on drop; the monitor process, which has its own copy of the lock, owns
    /// it now.
    pub fn keep(&mut self) {
        self.kept = true;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.kept {
            // What cannot be removed is swept by the next command.
            let _ = self.dir.remove();
            self.base.leave();
        }
    }
}

/// Opens or creates a file that only its owner can access.
pub fn open_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}
