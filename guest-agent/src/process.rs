//! The process of an exec, from its start to its report: signalled, timed out, killed, dead.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::{DEFAULT_GRACE, MAX_TIMEOUT};
use pvmm_guest_agent::message::{
    Exec, ExecReport, ExecStatus, OutputCount, Scope, Usage, WindowSize,
};

use crate::cgroup::{self, Cgroup};
use crate::oom::OomLog;
use crate::sys::{self, Reaped};
use crate::terminal;

pub struct Process {
    pub pid: libc::pid_t,
    pub cgroup: Option<Cgroup>,
    /// The agent's side of the process's terminal.
    pub terminal: Option<OwnedFd>,
    pub begun: Instant,
    grace: Duration,
    phase: ProcessPhase,
    pub timed_out: bool,
    /// Other processes held an output of the process when it was dead.
    pub background: bool,
}

/// The stage of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProcessPhase {
    Running,
    /// The time limit has passed and SIGTERM was sent.
    Terminating,
    Killed,
    /// The process is dead; output that is still in the pipes is being sent.
    Dead(Death),
}

/// The result of a dead process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Death {
    status: ExecStatus,
    /// A process of the exec was killed for lack of memory.
    oom: bool,
    usage: Usage,
    after: Duration,
}

impl Process {
    pub fn new(
        exec: &Exec,
        pid: libc::pid_t,
        cgroup: Option<Cgroup>,
        terminal: Option<OwnedFd>,
        begun: Instant,
    ) -> Self {
        Self {
            pid,
            cgroup,
            terminal,
            begun,
            grace: duration(exec.grace_ms).unwrap_or(DEFAULT_GRACE),
            phase: ProcessPhase::Running,
            timed_out: false,
            background: false,
        }
    }

    pub fn is_dead(&self) -> bool {
        matches!(self.phase, ProcessPhase::Dead(_))
    }

    pub fn signal(&self, signal: libc::c_int, scope: Scope) {
        match scope {
            Scope::Process | Scope::Group if self.is_dead() => {}
            Scope::Process => drop(sys::kill(self.pid, signal)),
            Scope::Group => drop(sys::kill(-self.pid, signal)),
            Scope::Tree => self.signal_tree(signal),
        }
    }

    fn signal_tree(&self, signal: libc::c_int) {
        match &self.cgroup {
            _ if signal == libc::SIGKILL => self.kill_tree(),
            Some(cgroup) => cgroup.signal(signal),
            None => cgroup::signal_relatives(self.pid, signal),
        }
    }

    pub fn kill_tree(&self) {
        match &self.cgroup {
            Some(cgroup) => cgroup.kill(),
            None => cgroup::kill_relatives(self.pid),
        }
    }

    pub fn resize(&self, size: WindowSize) -> Result<(), &'static str> {
        let terminal = self.terminal.as_ref().ok_or("the process has no terminal")?;
        // A process that has just ended needs no size.
        let _ = terminal::resize(terminal, size);
        Ok(())
    }

    /// Takes the next step against a process whose time is over, and returns when the one after it
    /// is due.
    pub fn time_out(&mut self) -> Option<Instant> {
        match self.phase {
            ProcessPhase::Running => {
                self.timed_out = true;
                self.phase = ProcessPhase::Terminating;
                if self.grace.is_zero() {
                    return self.time_out();
                }
                self.signal_tree(libc::SIGTERM);
                // A stopped process cannot act on the SIGTERM before it is continued.
                self.signal_tree(libc::SIGCONT);
                Some(Instant::now() + self.grace)
            }
            ProcessPhase::Terminating => {
                self.kill_tree();
                self.phase = ProcessPhase::Killed;
                None
            }
            ProcessPhase::Killed | ProcessPhase::Dead(_) => None,
        }
    }

    /// Notes that the process and those it started were killed.
    pub fn set_killed(&mut self) {
        if !self.is_dead() {
            self.phase = ProcessPhase::Killed;
        }
    }

    /// Notes the death of the process. `limited` says whether control groups have limits.
    pub fn set_dead(&mut self, dead: &Reaped, log: &mut OomLog, limited: bool) {
        log.catch_up();
        let oom = log.names(dead.pid as u32)
            || self.cgroup.as_ref().is_some_and(|cgroup| limited && cgroup.oom_kills() > 0);
        self.phase = ProcessPhase::Dead(Death {
            oom,
            status: status(dead.status),
            usage: usage(&dead.usage),
            after: self.begun.elapsed(),
        });
    }

    /// Returns the report of a dead process.
    pub fn report(&self, stdout: OutputCount, stderr: OutputCount) -> Option<ExecReport> {
        let ProcessPhase::Dead(death) = self.phase else { return None };
        Some(ExecReport {
            status: death.status,
            timed_out: self.timed_out,
            background: self.background,
            oom: death.oom,
            stdout,
            stderr,
            duration_us: death.after.as_micros() as u64,
            usage: death.usage,
        })
    }
}

/// Returns when the time of an exec that began then is over.
pub fn deadline(exec: &Exec, begun: Instant) -> Option<Instant> {
    duration(exec.timeout_ms).map(|timeout| begun + timeout)
}

fn duration(millis: Option<u64>) -> Option<Duration> {
    millis.map(|millis| Duration::from_millis(millis).min(MAX_TIMEOUT))
}

pub fn status(raw: libc::c_int) -> ExecStatus {
    if libc::WIFSIGNALED(raw) {
        ExecStatus::Signaled { signal: libc::WTERMSIG(raw), core_dumped: libc::WCOREDUMP(raw) }
    } else {
        ExecStatus::Exited { code: libc::WEXITSTATUS(raw) }
    }
}

fn usage(raw: &libc::rusage) -> Usage {
    let micros = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
    Usage {
        user_us: micros(raw.ru_utime),
        system_us: micros(raw.ru_stime),
        max_rss_kib: raw.ru_maxrss as u64,
    }
}
