//! Messages about processes that outlive their client: kept, listed, attached to, ended.

use serde::{Deserialize, Serialize};

use super::{ExecReport, Scope};

/// In an exec: let the process go on without its client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detach {
    /// Of each output keep the newest bytes, this many.
    #[serde(default)]
    pub keep: Option<u32>,
}

/// The answer to such an exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detached {
    pub id: u64,
    pub pid: u32,
}

/// Replays a process's output from these offsets and follows it to its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    pub id: u64,
    #[serde(default)]
    pub stdout_from: u64,
    #[serde(default)]
    pub stderr_from: u64,
    /// The input channel is the process's standard input.
    #[serde(default)]
    pub input: bool,
}

/// In `Started`: where the replay begins, which is later than asked for where bytes are lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replay {
    pub stdout_from: u64,
    pub stderr_from: u64,
    /// The process has a terminal.
    #[serde(default)]
    pub terminal: bool,
}

/// Signals a process by its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignalProcess {
    pub id: u64,
    pub signal: i32,
    #[serde(default)]
    pub scope: Scope,
}

/// Names a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    pub id: u64,
}

/// A detached process, as a listing has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInfo {
    pub id: u64,
    pub pid: u32,
    /// The beginning of its command line, made text.
    #[serde(default)]
    pub command: String,
    /// Since it was started.
    #[serde(default)]
    pub age_us: u64,
    #[serde(default)]
    pub terminal: bool,
    /// Clients that follow it now.
    #[serde(default)]
    pub attached: u32,
    /// Bytes written by now, and the offset of the oldest that is kept.
    #[serde(default)]
    pub stdout: Kept,
    #[serde(default)]
    pub stderr: Kept,
    /// How it ended, if it has.
    #[serde(default)]
    pub report: Option<ExecReport>,
}

/// What is kept of an output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    pub from: u64,
    pub to: u64,
}
