//! The exit status of a process, and the exit code that a shell would give.
//!
//! Numbers from the guest are untrusted and are brought into range here.

use std::time::Duration;

use pvmm_guest_agent::message::{ExecReport, ExecStatus, OutputCount, Stage, Usage};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExitStatus {
    /// How the process itself ended. Codes are in 0 to 255, signals in 1 to 64.
    pub status: ExecStatus,
    /// The time limit ended the process.
    pub timed_out: bool,
    /// A background process still held an output when the streams were closed.
    pub background: bool,
    /// The process, or one that it started, was killed for lack of memory.
    pub oom: bool,
    /// The byte counts of the standard output.
    pub stdout: OutputCount,
    /// The byte counts of the standard error.
    pub stderr: OutputCount,
    /// How long the process ran, as the guest measured it.
    pub duration: Duration,
    /// The resources that the process used, as the guest measured them.
    pub usage: Usage,
}

impl ExitStatus {
    /// Converts the agent's report, with every number brought into range.
    pub(super) fn from_report(report: ExecReport) -> Self {
        let status = match report.status {
            ExecStatus::Exited { code } if !(0..=255).contains(&code) => {
                ExecStatus::Exited { code: 255 }
            }
            ExecStatus::Signaled { signal, core_dumped } => {
                ExecStatus::Signaled { signal: signal.clamp(1, 64), core_dumped }
            }
            other => other,
        };
        Self {
            status,
            timed_out: report.timed_out,
            background: report.background,
            oom: report.oom,
            stdout: report.stdout,
            stderr: report.stderr,
            duration: Duration::from_micros(report.duration_us),
            usage: report.usage,
        }
    }

    /// Returns whether the process ran and exited with 0.
    pub fn success(&self) -> bool {
        self.status == ExecStatus::Exited { code: 0 } && !self.timed_out
    }

    /// Returns the code that a shell would give: the exit code, 124 after a time limit, 126 and 127
    /// for a command that could not start, 128 + n after a signal.
    pub fn shell_code(&self) -> u8 {
        match self.status {
            ExecStatus::CouldNotStart { stage: Stage::Exec, errno }
                if errno == libc::ENOENT || errno == libc::ENOTDIR =>
            {
                127
            }
            ExecStatus::CouldNotStart { .. } => 126,
            _ if self.timed_out => 124,
            ExecStatus::Exited { code } => code as u8,
            ExecStatus::Signaled { signal, .. } => 128 + signal as u8,
        }
    }
}
