//! The confinement of the process that runs one VM: layer by layer, once all that it needs is open.
//!
//! The process is forked by [`fork`] into namespaces of its own, opens its files, and calls
//! [`Confinement::enter`]. From then on its file system is a read-only root with the folders that
//! it needs, it has no privilege that it could use or get back, and a fault in it reaches nothing
//! else. Nothing of a confinement has a name on the host, so nothing of it can be left behind.
//!
//! | layer | with root | without |
//! | --- | --- | --- |
//! | pid, mount, ipc, uts, net and cgroup namespace | yes | in a user namespace |
//! | root of its own, read-only, no `/proc`, `/sys`, `/dev` | yes | in a user namespace |
//! | user and group of its own, no other groups | yes | no: it stays the caller |
//! | no capabilities, none to be had again | yes | yes |
//! | resource limits | yes | all but processes |
//! | Landlock | where the kernel has it | where the kernel has it |

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};

use crate::error::JailError;
use crate::sys::{self, Forked};

/// Where descriptors are listed.
const DESCRIPTORS: &str = "/proc/self/fd";

/// The means by which a process confines itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// The privileges of root, in a PID namespace of its own.
    Root,
    /// The privileges of a user in a user namespace of its own, and a PID namespace.
    UserNamespace,
    /// No namespace could be made; this is the error number of the attempt.
    NoNamespace(i32),
}

/// The side of [`fork`] that the caller is on.
pub enum Side {
    /// The process id of the child.
    Parent(u32),
    Child(Means),
}

/// Forks a child into a PID namespace of its own, and a user namespace where that takes one. Where
/// neither can be had, the child is an ordinary one. With a `group` the child begins in that
/// control group. This process must have a single thread.
pub fn fork(group: Option<BorrowedFd<'_>>) -> Result<Side, JailError> {
    // Root without the privilege for the first would get files in a user namespace that it cannot
    // use there.
    let (means, namespaces) = if sys::is_root() {
        (Means::Root, libc::CLONE_NEWPID)
    } else {
        (Means::UserNamespace, USER_AND_PIDS)
    };
    let (user, primary_group) = sys::own_ids();
    let refusal = match sys::fork_into(namespaces, group) {
        Ok(Forked::Parent(pid)) => return Ok(Side::Parent(pid)),
        Ok(Forked::Child) => {
            if means == Means::UserNamespace
                && let Err(error) = sys::map_own_user(user, primary_group)
            {
                // An error must not lead the child into its parent's code.
                eprintln!("cannot map the user into its namespace: {error}");
                sys::end(1)
            }
            return Ok(Side::Child(means));
        }
        Err(error) => error.raw_os_error().unwrap_or_default(),
    };
    match sys::fork_into(0, group).map_err(JailError::io("cannot fork"))? {
        Forked::Parent(pid) => Ok(Side::Parent(pid)),
        Forked::Child => Ok(Side::Child(Means::NoNamespace(refusal))),
    }
}

const USER_AND_PIDS: i32 = libc::CLONE_NEWUSER | libc::CLONE_NEWPID;
const OTHER_NAMESPACES: i32 =
    libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWCGROUP;

/// The limits of a process on the host's resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub open_files: u64,
    /// The largest file, memory files included.
    pub file_bytes: u64,
    /// Processes and threads of its user.
    pub processes: u64,
    pub locked_bytes: u64,
    pub address_space_bytes: u64,
}

/// The confinement that a process is to enter.
#[derive(Clone, Debug)]
pub struct Confinement {
    /// Any folder of the host: the new root is mounted over it, where only this process sees that.
    pub root: PathBuf,
    /// The folders of the host that the process keeps.
    pub folders: Vec<Folder>,
    /// Keep the host's network; otherwise the process has none.
    pub network: bool,
    /// The user and the group that the process becomes if it has root's privileges. Never 0.
    pub user: u32,
    pub limits: Limits,
}

/// A folder of the host inside a confinement.
#[derive(Clone, Debug)]
pub struct Folder {
    pub from: PathBuf,
    /// Its path inside, one level below the root.
    pub at: &'static str,
    pub access: Access,
}

/// How a process uses a folder, as far as its user may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Makes, reads, writes, renames and removes files, and makes sockets.
    Files,
    /// Makes files without a name.
    NamelessFiles,
    /// Connects to sockets.
    Sockets,
}

impl Access {
    fn rights(self) -> BitFlags<AccessFs> {
        let write = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
        match self {
            Self::Files => {
                let make = AccessFs::MakeReg | AccessFs::MakeSock;
                write | make | AccessFs::ReadDir | AccessFs::RemoveFile
            }
            Self::NamelessFiles => write,
            // No right of Landlock is needed to connect.
            Self::Sockets => AccessFs::ReadDir.into(),
        }
    }
}

/// A layer that this host does not allow, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingLayer {
    pub layer: &'static str,
    pub why: String,
}

impl Confinement {
    /// Makes the confinement this process's own, for good. Returns the layers that cannot be had
    /// with these means; a layer that should be there and cannot be made is an error, after which
    /// the process must end. The process must have a single thread and no folder open.
    pub fn enter(&self, means: Means) -> Result<Vec<MissingLayer>, JailError> {
        let mut missing = Vec::new();
        refuse_open_folders()?;
        match means {
            Means::Root | Means::UserNamespace => {
                let network = if self.network { 0 } else { libc::CLONE_NEWNET };
                sys::unshare(OTHER_NAMESPACES | network)
                    .map_err(JailError::io("cannot make namespaces"))?;
                self.enter_root()?;
            }
            Means::NoNamespace(errno) => {
                let why = io::Error::from_raw_os_error(errno).to_string();
                missing.push(MissingLayer { layer: "namespaces", why });
            }
        }
        self.limit(means)?;
        self.drop_privileges(means, &mut missing)?;
        self.restrict_files(means, &mut missing)?;
        sys::forget_environment();
        Ok(missing)
    }

    /// Makes an empty file system the root, with nothing but the folders mounted in it.
    fn enter_root(&self) -> Result<(), JailError> {
        let failed = |act: &str, path: &Path, error| {
            JailError::new(format!("{}: cannot {act}", path.display()), error)
        };
        let step = |act: &'static str| move |error| failed(act, &self.root, error);
        sys::make_mounts_private().map_err(step("leave the mounts of the host"))?;
        let mut mounts = Vec::with_capacity(self.folders.len());
        for folder in &self.folders {
            let clone = sys::clone_mount(&folder.from);
            mounts.push(clone.map_err(|error| failed("clone its mount", &folder.from, error))?);
        }
        sys::mount_empty(&self.root).map_err(step("mount the new root there"))?;
        for (folder, mount) in self.folders.iter().zip(&mounts) {
            let mounted = self.mount_inside(folder, mount);
            mounted.map_err(|error| failed("mount it in the new root", &folder.from, error))?;
        }
        sys::restrict_mount(&self.root, true).map_err(step("make the new root read-only"))?;
        sys::change_root(&self.root).map_err(step("make it the root"))
    }

    fn mount_inside(&self, folder: &Folder, mount: &OwnedFd) -> io::Result<()> {
        let place = self.root.join(folder.at.trim_start_matches('/'));
        fs::create_dir(&place)?;
        sys::attach_mount(mount.as_fd(), &place)?;
        sys::restrict_mount(&place, folder.access == Access::Sockets)
    }

    fn limit(&self, means: Means) -> Result<(), JailError> {
        let Limits { open_files, file_bytes, processes, locked_bytes, address_space_bytes } =
            self.limits;
        let mut limits = vec![
            (libc::RLIMIT_NOFILE, open_files),
            (libc::RLIMIT_FSIZE, file_bytes),
            (libc::RLIMIT_MEMLOCK, locked_bytes),
            (libc::RLIMIT_AS, address_space_bytes),
            (libc::RLIMIT_CORE, 0),
        ];
        if means == Means::Root {
            // Another user's processes would count too if the process kept its user.
            limits.push((libc::RLIMIT_NPROC, processes));
        }
        for (resource, most) in limits {
            sys::lower_limit(resource, most)
                .map_err(|error| JailError::new(format!("cannot set limit {resource}"), error))?;
        }
        Ok(())
    }

    fn drop_privileges(
        &self,
        means: Means,
        missing: &mut Vec<MissingLayer>,
    ) -> Result<(), JailError> {
        let failed = JailError::io("cannot drop the privileges");
        let drop = || {
            sys::clear_bounding_set()?;
            if means == Means::Root {
                sys::become_user(self.user, self.user)?;
            }
            sys::clear_capabilities()?;
            sys::forbid_new_privileges()
        };
        if means != Means::Root {
            let why = if sys::is_root() { "it takes namespaces" } else { "it takes root" };
            let why = why.to_owned();
            missing.push(MissingLayer { layer: "user of its own", why });
        }
        drop().map_err(failed)
    }

    /// Allows no path but the folders, and no network unless it is kept, to this process and its
    /// children.
    fn restrict_files(
        &self,
        means: Means,
        missing: &mut Vec<MissingLayer>,
    ) -> Result<(), JailError> {
        let own_root = !matches!(means, Means::NoNamespace(_));
        let abi = ABI::V6;
        let restrict = || -> Result<_, Box<dyn std::error::Error>> {
            let mut rules = Ruleset::default().handle_access(AccessFs::from_all(abi))?;
            if !self.network {
                rules = rules.handle_access(AccessNet::from_all(abi))?;
            }
            let mut rules = rules.scope(Scope::from_all(abi))?.create()?;
            for folder in &self.folders {
                let path = if own_root { Path::new(folder.at) } else { &folder.from };
                let rights = folder.access.rights();
                rules = rules.add_rule(PathBeneath::new(PathFd::new(path)?, rights))?;
            }
            Ok(rules.restrict_self()?)
        };
        let status = restrict().map_err(|error| {
            JailError::plain(format!("cannot restrict access to files by Landlock: {error}"))
        })?;
        if status.ruleset == RulesetStatus::NotEnforced {
            let why = "this kernel has it not, or not in use".to_owned();
            missing.push(MissingLayer { layer: "Landlock", why });
        }
        Ok(())
    }
}

/// Puts this process, which has root's privileges and a root folder of its own, into further
/// namespaces, and takes away what no user gives up with its id.
pub(crate) fn isolate() -> io::Result<()> {
    sys::unshare(libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWCGROUP)?;
    sys::lower_limit(libc::RLIMIT_CORE, 0)?;
    sys::clear_bounding_set()
}

/// Leaves this process, which has its last user, no capability, no way to one, and no TCP where the
/// kernel has Landlock.
pub(crate) fn forbid_privileges_and_network() -> io::Result<()> {
    sys::clear_capabilities()?;
    sys::forbid_new_privileges()?;
    let restrict = || -> Result<_, Box<dyn std::error::Error>> {
        let rules = Ruleset::default().handle_access(AccessNet::from_all(ABI::V6))?;
        Ok(rules.scope(Scope::from_all(ABI::V6))?.create()?.restrict_self()?)
    };
    restrict().map(drop).map_err(|error| io::Error::other(format!("Landlock: {error}")))
}

/// Refuses to go on with a folder open: it would be a way out of the new root.
fn refuse_open_folders() -> Result<(), JailError> {
    let look = || -> io::Result<Option<PathBuf>> {
        for entry in fs::read_dir(DESCRIPTORS)? {
            let link = entry?.path();
            let is_folder = fs::metadata(&link).is_ok_and(|facts| facts.is_dir());
            let target = fs::read_link(&link)?;
            // The list that is being read is a folder too, of which `/proc` names the process.
            let is_list = target.starts_with("/proc") && target.ends_with("fd");
            if is_folder && !is_list {
                return Ok(Some(target));
            }
        }
        Ok(None)
    };
    match look().map_err(JailError::io("cannot list what is open"))? {
        Some(folder) => {
            let what = format!("{}: is still open, a way out of the jail", folder.display());
            Err(JailError::plain(what))
        }
        None => Ok(()),
    }
}
