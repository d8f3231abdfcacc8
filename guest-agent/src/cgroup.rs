//! One control group per exec, so that a whole process tree can be ended whatever it does.
//!
//! Without cgroup v2 the process group, the session and parentage are used instead
//! (`kill_relatives`).

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pvmm_guest_agent::message::Limits;

use crate::sys;

const HIERARCHY: &str = "/sys/fs/cgroup";
const CPU_PERIOD_US: u64 = 100_000;
/// Rounds of searching for relatives to kill; each finds processes that were forked during the one
/// before.
const KILL_ROUNDS: usize = 16;

/// The delay between a command and the cleanup after it, so that the command, its answer and the
/// next command get the processor first.
const TIDY_AFTER: Duration = Duration::from_secs(2);
/// With this many retired groups the cleanup is not delayed, since removing them would take long.
const LEFT_MAX: usize = 32;

/// Creates and removes control groups below one directory.
pub struct Cgroups {
    base: PathBuf,
    next: u64,
    /// A group made in advance, so that the next exec need not wait for it.
    spare: Option<Cgroup>,
    /// Groups of ended execs that are not removed yet, for example because a background process
    /// still runs in them.
    lingering: Vec<PathBuf>,
    /// When to clean up, if a group was used or retired since the last time.
    tidy_at: Option<Instant>,
    frozen: Arc<AtomicBool>,
    /// The kernel accounts for memory, processes and processors of each group.
    limits: bool,
}

/// Freezes and thaws all groups together, from any thread.
pub struct Freezer {
    base: PathBuf,
    frozen: Arc<AtomicBool>,
}

/// The control group of one exec.
pub struct Cgroup {
    path: PathBuf,
    dir: File,
}

impl Cgroups {
    /// Uses the directory `wish`, or one below the agent's own group; returns `None` where cgroup
    /// v2 cannot be used.
    pub fn prepare(wish: Option<PathBuf>) -> Option<Self> {
        let base = wish.or_else(default_base)?;
        fs::create_dir_all(&base).ok()?;
        // This also refuses a directory of another filesystem.
        base.join("cgroup.kill").exists().then_some(())?;
        let frozen = Arc::default();
        let (spare, lingering, limits) = (None, Vec::new(), false);
        let tidy_at = Some(Instant::now());
        let mut this = Self { base, next: 0, spare, lingering, tidy_at, frozen, limits };
        // A previous agent may have ended in the middle of a freeze.
        let _ = this.thaw();
        this.adopt_leftovers();
        Some(this)
    }

    /// Kills the processes that a killed previous agent left in the directory.
    fn adopt_leftovers(&mut self) {
        let Ok(entries) = fs::read_dir(&self.base) else { return };
        for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()) {
            let _ = fs::write(path.join("cgroup.kill"), "1");
            self.lingering.push(path);
        }
    }

    pub fn create(&mut self) -> io::Result<Cgroup> {
        if self.is_frozen() {
            // Starting a process waits for its program, which would never run.
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        self.tidy_later();
        self.spare.take().map_or_else(|| self.make(), Ok)
    }

    fn make(&mut self) -> io::Result<Cgroup> {
        loop {
            let path = self.base.join(format!("exec-{}", self.next));
            self.next += 1;
            match fs::create_dir(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
                Ok(()) => return Ok(Cgroup { dir: File::open(&path)?, path }),
            }
        }
    }

    /// Enables limits for the groups. Done only on request: accounting slows down every exec a
    /// little.
    pub fn enable_limits(&mut self) -> io::Result<()> {
        if self.limits {
            return Ok(());
        }
        let controllers = "+memory +pids +cpu";
        let parent = self.base.parent().ok_or(io::ErrorKind::NotFound)?;
        for place in [parent, &self.base] {
            fs::write(place.join("cgroup.subtree_control"), controllers)?;
        }
        self.limits = true;
        Ok(())
    }

    /// Returns whether groups can be limited.
    pub fn has_limits(&self) -> bool {
        self.limits
    }

    /// Retires a group, which is removed once its processes have ended.
    pub fn retire(&mut self, cgroup: Cgroup) {
        drop(cgroup.dir);
        self.lingering.push(cgroup.path);
        self.tidy_later();
    }

    /// Schedules a cleanup, because processes have ended and groups may be empty now.
    pub fn note_deaths(&mut self) {
        self.tidy_later();
    }

    fn tidy_later(&mut self) {
        let wait = if self.lingering.len() < LEFT_MAX { TIDY_AFTER } else { Duration::ZERO };
        let at = Instant::now() + wait;
        self.tidy_at = Some(self.tidy_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// Returns when [`Self::tidy`] has something to do.
    pub fn tidy_at(&self) -> Option<Instant> {
        self.tidy_at
    }

    /// Removes retired groups and makes a spare one, if it is time. Call it when nothing else is
    /// waiting.
    pub fn tidy(&mut self) {
        if self.tidy_at.is_some_and(|at| at <= Instant::now()) {
            self.tidy_now();
        }
    }

    /// Cleans up at once, before the workload is frozen.
    pub fn tidy_now(&mut self) {
        self.tidy_at = None;
        self.sweep();
        if self.spare.is_none() {
            // If this fails, the exec that needs a group reports the reason.
            self.spare = self.make().ok();
        }
    }

    fn sweep(&mut self) {
        self.lingering
            .retain(|path| remove(path).is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY)));
    }

    /// Returns whether the workload is frozen, so that nothing may be started.
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire)
    }

    pub fn set_frozen(&mut self, frozen: bool) {
        self.frozen.store(frozen, Ordering::Release);
    }

    pub fn freezer(&self) -> Freezer {
        Freezer { base: self.base.clone(), frozen: Arc::clone(&self.frozen) }
    }

    /// Freezes the workload without waiting until it has stopped.
    pub fn hold(&mut self) {
        self.set_frozen(true);
        let _ = self.freezer().freeze();
    }

    pub fn thaw(&mut self) -> io::Result<()> {
        self.freezer().thaw()
    }

    /// Kills everything in every group and removes the groups, as far as they become empty
    /// meanwhile.
    pub fn close(mut self) {
        let _ = fs::write(self.base.join("cgroup.kill"), "1");
        self.spare = None;
        self.adopt_leftovers();
        for _ in 0..100 {
            while sys::reap().is_some() {}
            self.sweep();
            if fs::remove_dir(&self.base).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}

impl Freezer {
    /// Returns whether the workload is frozen, or about to be.
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire)
    }

    pub fn freeze(&self) -> io::Result<()> {
        fs::write(self.base.join("cgroup.freeze"), "1")
    }

    /// Returns whether the last process has stopped.
    pub fn stands_still(&self) -> io::Result<bool> {
        let events = fs::read_to_string(self.base.join("cgroup.events"))?;
        Ok(events.lines().any(|line| line == "frozen 1"))
    }

    pub fn thaw(&self) -> io::Result<()> {
        fs::write(self.base.join("cgroup.freeze"), "0")?;
        self.frozen.store(false, Ordering::Release);
        Ok(())
    }
}

fn remove(path: &Path) -> io::Result<()> {
    let first = fs::remove_dir(path);
    if first.is_ok() {
        return first;
    }
    // A process in the group may have made groups of its own.
    for entry in fs::read_dir(path)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let _ = remove(&entry.path());
        }
    }
    fs::remove_dir(path)
}

fn default_base() -> Option<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new(HIERARCHY).join(path).join("pvmm"))
}

impl Cgroup {
    /// Returns the directory, for starting a process in the group.
    pub fn fd(&self) -> RawFd {
        self.dir.as_raw_fd()
    }

    /// Limits what the processes in the group may use together.
    pub fn limit(&self, limits: &Limits) -> io::Result<()> {
        let write = |name: &str, value: String| fs::write(self.path.join(name), value);
        if let Some(bytes) = limits.memory {
            write("memory.max", bytes.to_string())?;
            // A guest without swap has no such file, and needs none.
            let _ = write("memory.swap.max", "0".into());
        }
        if let Some(count) = limits.pids {
            write("pids.max", count.to_string())?;
        }
        if let Some(milli) = limits.cpu_milli {
            write(
                "cpu.max",
                format!("{} {CPU_PERIOD_US}", u64::from(milli) * CPU_PERIOD_US / 1000),
            )?;
        }
        Ok(())
    }

    /// Returns how many processes in the group were killed for lack of memory; zero without
    /// accounting.
    pub fn oom_kills(&self) -> u64 {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.parse().ok()).unwrap_or(0)
    }

    /// Kills every process in the group at once; none can escape by forking.
    pub fn kill(&self) {
        let _ = fs::write(self.path.join("cgroup.kill"), "1");
    }

    /// Sends a signal to every process in the group.
    pub fn signal(&self, signal: libc::c_int) {
        let list = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        for pid in list.lines().filter_map(|line| line.parse().ok()) {
            let _ = sys::kill(pid, signal);
        }
    }
}

/// Signals a process, its group, its session and its descendants, which are found in /proc.
pub fn signal_relatives(root: libc::pid_t, signal: libc::c_int) {
    for pid in relatives(root) {
        let _ = sys::kill(pid, signal);
    }
}

/// Kills a process and its relatives, repeatedly until none is found.
pub fn kill_relatives(root: libc::pid_t) {
    for _ in 0..KILL_ROUNDS {
        let found = relatives(root);
        if found.is_empty() {
            return;
        }
        for pid in found {
            let _ = sys::kill(pid, libc::SIGKILL);
        }
    }
}

fn relatives(root: libc::pid_t) -> Vec<libc::pid_t> {
    let Ok(entries) = fs::read_dir("/proc") else { return vec![root] };
    let all: Vec<ProcessStat> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(ProcessStat::read)
        .collect();
    let mut found: Vec<libc::pid_t> = Vec::new();
    loop {
        let before = found.len();
        for process in &all {
            let related = process.pid == root
                || process.group == root
                || process.session == root
                || process.parent == root
                || found.contains(&process.parent);
            if related && !found.contains(&process.pid) {
                found.push(process.pid);
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

struct ProcessStat {
    pid: libc::pid_t,
    parent: libc::pid_t,
    group: libc::pid_t,
    session: libc::pid_t,
}

impl ProcessStat {
    /// Reads a process; returns `None` for one that is gone, or dead and not reaped yet.
    fn read(pid: libc::pid_t) -> Option<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        let stat = String::from_utf8_lossy(&stat);
        // The name is in parentheses and may contain anything, so fields are counted from its end.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        if matches!(fields.next()?, "Z" | "X") {
            return None;
        }
        let mut number = || fields.next()?.parse().ok();
        Some(Self { pid, parent: number()?, group: number()?, session: number()? })
    }
}
