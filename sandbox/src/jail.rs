//! The jail around a monitor process: the flags that concern it, and how it is sized for a VM.
//!
//! `pvmm_jailer::confine` has the layers; here is the launcher's choice of user, folders and
//! limits.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use pvmm_jailer::confine::{Access, Confinement, Folder, Limits};
use pvmm_jailer::group::{Group, GroupLimits};

use crate::failure::Failure;
use crate::sys::process;
use crate::vm_dir::{self, Record, UidRange};

/// The users of monitor processes: a range that no distribution and no tool assigns.
pub const DEFAULT_USERS: &str = "1900000000-1900065535";

/// Environment variable for another range.
pub const USERS: &str = "PVMM_UID_RANGE";

/// The path of the VM's own folder inside its jail.
pub const FOLDER: &str = "/vm";
/// The path of the folder for nameless files inside the jail.
pub const SCRATCH: &str = "/scratch";
/// The path of the folder with the sockets that the guest connects to inside the jail.
pub const SOCKETS: &str = "/sockets";

/// The most open files: connections through vsock and ports take one or two each.
const OPEN_FILES: u64 = 8192;
/// Threads beside those of the vCPUs.
const OTHER_THREADS: u64 = 256;
const LOCKED_BYTES: u64 = 8 << 20;
/// Address space beside guest memory, which may be mapped twice for a moment.
const OTHER_ADDRESS_SPACE: u64 = 16 << 30;
/// The largest log of denied and allowed connections.
const EGRESS_LOG_BYTES: u64 = 64 << 20;
/// Memory of the host beside twice the guest's: a checkpoint or a fork keeps the old state beside
/// the new one.
const OTHER_MEMORY: u64 = 256 << 20;
/// Processors beside those of the guest, for its devices.
const OTHER_CPUS: u32 = 1;
/// The weight of a VM with one vCPU, which is that of a group without a weight.
const WEIGHT_PER_CPU: u32 = 100;
/// The largest file beside guest memory: a disk of a VM, or a layer of it.
const DISK_BYTES: u64 = 64 << 40;

/// Returns the users of monitor processes, as the environment says or the default.
pub fn default_users() -> Result<UidRange, Failure> {
    let text = std::env::var(USERS).ok().filter(|text| !text.is_empty());
    vm_dir::uid_range(text.as_deref().unwrap_or(DEFAULT_USERS))
        .map_err(|why| Failure::usage(format!("{USERS}: {why}")))
}

/// Describes the confinement of a VM's process, which makes nameless files in `scratch` and whose
/// guest connects to sockets beside `vsock`.
pub fn around(folder: &Path, scratch: &Path, vsock: Option<&Path>, record: &Record) -> Confinement {
    let Record { user, cpus, memory_mib, .. } = *record;
    let memory = memory_mib << 20;
    let keep = |from: &Path, at, access| Folder { from: from.to_owned(), at, access };
    let mut folders =
        vec![keep(folder, FOLDER, Access::Files), keep(scratch, SCRATCH, Access::NamelessFiles)];
    folders.extend(vsock.and_then(Path::parent).map(|it| keep(it, SOCKETS, Access::Sockets)));
    let limits = Limits {
        open_files: OPEN_FILES,
        file_bytes: memory.max(DISK_BYTES),
        processes: u64::from(cpus) + OTHER_THREADS,
        locked_bytes: LOCKED_BYTES,
        address_space_bytes: 4 * memory + OTHER_ADDRESS_SPACE,
    };
    let user = user.unwrap_or_default();
    Confinement { root: folder.to_owned(), folders, network: false, user, limits }
}

/// Describes the confinement of the process through which a VM reaches the network. The new root is
/// mounted over `folder`, of which the process sees nothing.
pub fn around_egress(folder: &Path, record: &Record) -> Confinement {
    let limits = Limits {
        open_files: OPEN_FILES,
        file_bytes: EGRESS_LOG_BYTES,
        processes: 1,
        locked_bytes: 0,
        address_space_bytes: OTHER_ADDRESS_SPACE,
    };
    let user = record.user.unwrap_or_default();
    Confinement { root: folder.to_owned(), folders: Vec::new(), network: true, user, limits }
}

/// Makes the control group of a VM.
pub fn group(record: &Record) -> io::Result<Group> {
    let limits = GroupLimits {
        memory_bytes: 2 * (record.memory_mib << 20) + OTHER_MEMORY,
        processes: u64::from(record.cpus) + OTHER_THREADS,
        cpus: record.cpus + OTHER_CPUS,
        weight: record.cpus.saturating_mul(WEIGHT_PER_CPU),
    };
    Group::create(&record.id, limits)
}

/// Returns the folder for nameless files of VMs in `dir`, which may have other files that a VM's
/// process must not reach. A process with a user of its own needs one where everybody may make
/// files and nobody may list them.
pub fn scratch(dir: &Path, record: &Record) -> Result<PathBuf, Failure> {
    own_scratch(dir, record.user.is_some()).map_err(|error| {
        Failure::fault(format!("cannot make a folder in {}: {error}", dir.display()))
    })
}

/// Makes the folder, or takes the one that is there.
fn own_scratch(dir: &Path, other_user: bool) -> io::Result<PathBuf> {
    let mode = if other_user { 0o1733 } else { 0o700 };
    let own = dir.join(format!("pvmm-scratch-{}", process::effective_uid()));
    match DirBuilder::new().mode(0o700).create(&own) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let facts = fs::symlink_metadata(&own)?;
    if !facts.is_dir() || facts.uid() != process::effective_uid() {
        return Err(io::Error::other(format!("{} is not a folder of yours", own.display())));
    }
    if facts.mode() & 0o7777 != mode {
        fs::set_permissions(&own, Permissions::from_mode(mode))?;
    }
    Ok(own)
}
