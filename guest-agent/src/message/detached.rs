//! Messages about detached processes, which outlive their client: listed, attached to, ended.

use serde::{Deserialize, Serialize};

use super::{ExecReport, Scope};

/// In an exec: lets the process continue without its client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detach {
    /// The number of newest bytes that are kept of each output.
    #[serde(default)]
    pub keep: Option<u32>,
}

/// The answer to an exec with `detach`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detached {
    pub id: u64,
    pub pid: u32,
}

/// Sends a process's output from these offsets on, until its end.
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

/// In `Started`: where the output begins, which is later than requested if bytes are lost.
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

/// The id of a detached process that is to be forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    pub id: u64,
    /// Whether the rest of a process that has ended goes on.
    #[serde(default)]
    pub leave: bool,
}

/// A detached process in a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInfo {
    pub id: u64,
    pub pid: u32,
    /// The beginning of its command line, as text.
    #[serde(default)]
    pub command: String,
    /// The time since its start.
    #[serde(default)]
    pub age_us: u64,
    #[serde(default)]
    pub terminal: bool,
    /// The number of attached clients.
    #[serde(default)]
    pub attached: u32,
    /// The offset of the oldest kept byte, and the number of bytes written so far.
    #[serde(default)]
    pub stdout: Kept,
    #[serde(default)]
    pub stderr: Kept,
    /// How the process ended, if it has.
    #[serde(default)]
    pub report: Option<ExecReport>,
}

/// The range of an output that is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    pub from: u64,
    pub to: u64,
}
