//! The control group of one VM: limits on memory, processes and processor time, and its end.
//!
//! Version 2 only, in a group named `pvmm` below the root of the hierarchy, or below the caller's
//! own group where that was delegated, or beside it if it is called `pvmm-server`. A group is a
//! folder of the kernel: the one thing of a jail that has a name, removed by whoever supervises the
//! VM, or by the next command if that one was killed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::sys;

const HIERARCHY: &str = "/sys/fs/cgroup";
const PARENT: &str = "pvmm";
/// The name of a caller's group beside which groups are made. The kernel limits nothing below a
/// group that has processes, so a service has its own below the group that it was given.
const SERVER: &str = "pvmm-server";
/// Controllers that limits need. One that the host lacks or does not delegate limits nothing.
const CONTROLLERS: [&str; 4] = ["memory", "pids", "cpu", "io"];
/// The kernel's default period, in which processor time is counted.
const PERIOD_US: u64 = 100_000;
/// The largest weight that the kernel takes.
const MAX_WEIGHT: u32 = 10_000;
/// How often and how long to wait for the last process of a group to be gone.
const REMOVE_ATTEMPTS: u32 = 50;
const REMOVE_PAUSE: Duration = Duration::from_millis(10);

/// The limits of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLimits {
    /// The most memory, the page cache of its files included; beyond it the group is killed.
    pub memory_bytes: u64,
    pub processes: u64,
    /// The most processors at once.
    pub cpus: u32,
    /// The share of processor time and of disk bandwidth beside other groups; 100 is usual.
    pub weight: u32,
}

/// A control group of one VM.
#[derive(Clone, Debug)]
pub struct Group {
    path: PathBuf,
}

impl Group {
    /// Makes the group of this name. Fails where the host has no version 2, or does not let this
    /// user make groups with limits.
    pub fn create(name: &str, limits: GroupLimits) -> io::Result<Self> {
        let parent = parent()?;
        match fs::create_dir(&parent) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        for controller in CONTROLLERS {
            // A limit that cannot be set is noticed below.
            let above = parent.parent().unwrap_or(&parent);
            let _ = write(&above.join("cgroup.subtree_control"), &format!("+{controller}"));
            let _ = write(&parent.join("cgroup.subtree_control"), &format!("+{controller}"));
        }
        let group = Self { path: parent.join(name) };
        let made = fs::create_dir(&group.path).and_then(|()| group.limit(limits));
        if made.is_err() {
            group.remove();
        }
        made.map(|()| group)
    }

    fn limit(&self, limits: GroupLimits) -> io::Result<()> {
        write(&self.path.join("memory.max"), &limits.memory_bytes.to_string())?;
        write(&self.path.join("memory.oom.group"), "1")?;
        write(&self.path.join("pids.max"), &limits.processes.to_string())?;
        let most = format!("{} {PERIOD_US}", u64::from(limits.cpus) * PERIOD_US);
        self.limit_if_there("cpu.max", &most)?;
        let weight = limits.weight.clamp(1, MAX_WEIGHT).to_string();
        self.limit_if_there("cpu.weight", &weight)?;
        self.limit_if_there("io.weight", &weight)
    }

    /// Sets a limit of a controller that many hosts lack or do not delegate.
    fn limit_if_there(&self, file: &str, value: &str) -> io::Result<()> {
        match write(&self.path.join(file), value) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            set => set,
        }
    }

    /// Returns the group of this name, which may not exist.
    pub fn named(name: &str) -> Option<Self> {
        Some(Self { path: parent().ok()?.join(name) })
    }

    /// Opens the group, for a process to be forked into it.
    pub fn open(&self) -> io::Result<OwnedFd> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY);
        options.open(&self.path).map(OwnedFd::from)
    }

    /// Kills every process in the group.
    pub fn kill(&self) -> io::Result<()> {
        write(&self.path.join("cgroup.kill"), "1")
    }

    /// Returns whether the kernel has killed the group for its use of memory.
    pub fn ran_out_of_memory(&self) -> bool {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.is_some_and(|count| count.trim() != "0")
    }

    /// Returns whether the limit leaves room for a second copy of all memory that its processes
    /// have written. A group without a limit does.
    pub fn has_room_for_a_copy(&self) -> bool {
        let limit = fs::read_to_string(self.path.join("memory.max")).unwrap_or_default();
        let Ok(limit) = limit.trim().parse::<u64>() else { return true };
        let facts = fs::read_to_string(self.path.join("memory.stat")).unwrap_or_default();
        let bytes = |name: &str| {
            let mut words = facts.lines().filter_map(|line| line.split_once(' '));
            words.find(|(word, _)| *word == name).map_or(0, |(_, count)| count.parse().unwrap_or(0))
        };
        let (written, layers): (u64, u64) = (bytes("anon"), bytes("shmem"));
        written.saturating_mul(2).saturating_add(layers) <= limit
    }

    /// Removes the group once its last process is gone, and the parent group with the last one.
    pub fn remove(&self) {
        for _ in 0..REMOVE_ATTEMPTS {
            match fs::remove_dir(&self.path) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    thread::sleep(REMOVE_PAUSE);
                }
                _ => break,
            }
        }
        if let Some(parent) = self.path.parent() {
            // The kernel refuses while another group is in it.
            let _ = fs::remove_dir(parent);
        }
    }
}

/// Returns the path of the group around those of all VMs.
fn parent() -> io::Result<PathBuf> {
    let root = Path::new(HIERARCHY);
    if !sys::is_cgroup2(&File::open(root)?)? {
        return Err(io::Error::other("this host has no cgroup v2 at /sys/fs/cgroup"));
    }
    if sys::is_root() {
        return Ok(root.join(PARENT));
    }
    let own = fs::read_to_string("/proc/self/cgroup")?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
    Ok(place(&root.join(own.unwrap_or_default())).join(PARENT))
}

/// Returns the group below which a caller in the group `own` makes others.
fn place(own: &Path) -> &Path {
    own.parent().filter(|_| own.ends_with(SERVER)).unwrap_or(own)
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_in_a_group_of_its_own_makes_groups_beside_it() {
        let unit = Path::new("/sys/fs/cgroup/system.slice/pvmm-serve.service");
        assert_eq!(place(unit), unit);
        assert_eq!(place(&unit.join("pvmm-server")), unit);
    }
}
