//! One control group per exec, so that a whole tree can be ended whatever it does to itself.
//! Without cgroup v2 the process group, the session and parentage have to do (`kill_relatives`).

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
/// Rounds of looking for relatives to kill; each finds what the one before let fork.
const KILL_ROUNDS: usize = 16;

/// Between a command and what is tidied up for it: the processor is the command's, its answer's and the next one's first.
const TIDY_AFTER: Duration = Duration::from_secs(2);
/// Unless so many groups are left that they would take long to remove.
const LEFT_MAX: usize = 32;

/// Makes and removes control groups below one directory.
pub struct Cgroups {
    base: PathBuf,
    next: u64,
    /// Made beforehand: the next exec need not wait for it.
    spare: Option<Cgroup>,
    /// Groups of ended execs, not removed yet, perhaps because a background process still lives in them.
    lingering: Vec<PathBuf>,
    /// When to tidy up, if something was taken or has ended since the last time.
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
    /// Uses `wish`, or a place below the agent's own group; `None` where cgroup v2 cannot be used.
    pub fn prepare(wish: Option<PathBuf>) -> Option<Self> {
        let base = wish.or_else(default_base)?;
        fs::create_dir_all(&base).ok()?;
        // Also tells a directory of some other filesystem from a control group.
        base.join("cgroup.kill").exists().then_some(())?;
        let frozen = Arc::default();
        let (spare, lingering, limits) = (None, Vec::new(), false);
        let tidy_at = Some(Instant::now());
        let mut this = Self { base, next: 0, spare, lingering, tidy_at, frozen, limits };
        // An agent before us may have ended in mid-freeze.
        let _ = this.thaw();
        this.adopt_leftovers();
        Some(this)
    }

    /// Ends what an agent before us, killed in mid-work, left in our place.
    fn adopt_leftovers(&mut self) {
        let Ok(entries) = fs::read_dir(&self.base) else { return };
        for path in entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()) {
            let _ = fs::write(path.join("cgroup.kill"), "1");
            self.lingering.push(path);
        }
    }

    pub fn create(&mut self) -> io::Result<Cgroup> {
        if self.is_frozen() {
            // Who starts a process waits for its program, and that would never run.
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

    /// Lets the groups be limited. Only done on wish: accounting costs every exec a little.
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

    /// Whether any group may be limited.
    pub fn has_limits(&self) -> bool {
        self.limits
    }

    /// Lets a group be removed once the processes in it have gone.
    pub fn retire(&mut self, cgroup: Cgroup) {
        drop(cgroup.dir);
        self.lingering.push(cgroup.path);
        self.tidy_later();
    }

    /// Processes have ended, and groups may be empty now.
    pub fn note_deaths(&mut self) {
        self.tidy_later();
    }

    fn tidy_later(&mut self) {
        let wait = if self.lingering.len() < LEFT_MAX { TIDY_AFTER } else { Duration::ZERO };
        let at = Instant::now() + wait;
        self.tidy_at = Some(self.tidy_at.map_or(at, |earlier| earlier.min(at)));
    }

    /// When [`Self::tidy`] has something to do.
    pub fn tidy_at(&self) -> Option<Instant> {
        self.tidy_at
    }

    /// Removes what is not needed any more and makes what will be, if it is time and nobody waits for anything else.
    pub fn tidy(&mut self) {
        if self.tidy_at.is_some_and(|at| at <= Instant::now()) {
            self.tidy_now();
        }
    }

    /// The same at once: what is about to stand still should be in order.
    pub fn tidy_now(&mut self) {
        self.tidy_at = None;
        self.sweep();
        if self.spare.is_none() {
            // The exec that needs it will say why there is none.
            self.spare = self.make().ok();
        }
    }

    fn sweep(&mut self) {
        self.lingering
            .retain(|path| remove(path).is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY)));
    }

    /// Whether nothing may be started, because what is started would stand still.
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire)
    }

    pub fn set_frozen(&mut self, frozen: bool) {
        self.frozen.store(frozen, Ordering::Release);
    }

    pub fn freezer(&self) -> Freezer {
        Freezer { base: self.base.clone(), frozen: Arc::clone(&self.frozen) }
    }

    /// Stops everything as soon as it can be, without waiting for it.
    pub fn hold(&mut self) {
        self.set_frozen(true);
        let _ = self.freezer().freeze();
    }

    pub fn thaw(&mut self) -> io::Result<()> {
        self.freezer().thaw()
    }

    /// Ends everything in every group and removes them, as far as they empty within the call.
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
    /// Whether everything stands still, or is about to.
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire)
    }

    pub fn freeze(&self) -> io::Result<()> {
        fs::write(self.base.join("cgroup.freeze"), "1")
    }

    /// Whether the last process has stopped.
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
    // A process in it may have made groups of its own.
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
    /// The directory, for a process to be born in.
    pub fn fd(&self) -> RawFd {
        self.dir.as_raw_fd()
    }

    /// Bounds what the processes in the group may use together.
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

    /// Processes in the group that were killed for lack of memory; zero where nobody counts.
    pub fn oom_kills(&self) -> u64 {
        let events = fs::read_to_string(self.path.join("memory.events")).unwrap_or_default();
        let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.parse().ok()).unwrap_or(0)
    }

    /// Kills every process in the group at once; none can fork its way out.
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

/// Signals a process, its group, its session and its descendants, by looking through /proc.
pub fn signal_relatives(root: libc::pid_t, signal: libc::c_int) {
    for pid in relatives(root) {
        let _ = sys::kill(pid, signal);
    }
}

/// Kills them, again and again until none is left to find.
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
    let all: Vec<Process> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(Process::read)
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

struct Process {
    pid: libc::pid_t,
    parent: libc::pid_t,
    group: libc::pid_t,
    session: libc::pid_t,
}

impl Process {
    /// `None` for one that is gone, or dead and waiting to be reaped.
    fn read(pid: libc::pid_t) -> Option<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        let stat = String::from_utf8_lossy(&stat);
        // The name is in parentheses and may hold anything, so count from its end.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        if matches!(fields.next()?, "Z" | "X") {
            return None;
        }
        let mut number = || fields.next()?.parse().ok();
        Some(Self { pid, parent: number()?, group: number()?, session: number()? })
    }
}
