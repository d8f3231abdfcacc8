//! Messages of interpreter sessions: open, run, close, list.
//!
//! They are separate because the rest of the protocol does not depend on languages.

use serde::{Deserialize, Serialize};

use super::{ByteBuf, ExecStatus, OutputCount};

/// A language that has interpreter sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Language {
    Python,
    Node,
}

/// Starts an interpreter that keeps its state from one `RunCode` to the next, from any client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSession {
    pub language: Language,
    /// The session's name; the agent chooses one by default.
    #[serde(default)]
    pub session: Option<String>,
    /// Use an existing session of that name instead of failing with EEXIST.
    #[serde(default)]
    pub reuse: bool,
    /// A program other than `python3` or `node`.
    #[serde(default)]
    pub program: Option<ByteBuf>,
    #[serde(default)]
    pub env: Vec<(ByteBuf, ByteBuf)>,
    #[serde(default)]
    pub cwd: Option<ByteBuf>,
    #[serde(default)]
    pub user: Option<String>,
    /// Start an interpreter for a later request, which is then answered sooner.
    #[serde(default)]
    pub spare: bool,
}

/// Runs code in a session. The output channel is a sequence of records: see `session.rs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunCode {
    pub session: String,
    pub code: ByteBuf,
    /// Time after which the code is interrupted; the session stays.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    /// Time between the interrupt and the end of the session, if the code ignores the interrupt.
    #[serde(default)]
    pub grace_ms: Option<u64>,
    /// The most bytes that are sent of each of the two outputs.
    #[serde(default)]
    pub output_limit: Option<u64>,
}

/// Ends a session and all processes it started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloseSession {
    pub session: String,
}

/// The description of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionInfo {
    pub session: String,
    pub language: Language,
    /// The interpreter's own version.
    #[serde(default)]
    pub version: String,
    #[serde(default)]
    pub pid: u32,
    /// Whether code is running in the session.
    #[serde(default)]
    pub busy: bool,
    /// The number of calls so far.
    #[serde(default)]
    pub runs: u64,
}

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunReport {
    pub status: RunStatus,
    /// The time limit interrupted the code.
    #[serde(default)]
    pub timed_out: bool,
    #[serde(default)]
    pub stdout: OutputCount,
    #[serde(default)]
    pub stderr: OutputCount,
    /// Displays, results and errors left out because the client did not read them in time.
    #[serde(default)]
    pub dropped: u64,
    #[serde(default)]
    pub duration_us: u64,
    /// The number of this call in the session.
    #[serde(default)]
    pub run: u64,
}

/// How the code ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// The code ran to its end.
    Ok {},
    /// The code raised an error; an error record describes it.
    Error {},
    /// The interpreter ended, and the session with it.
    Died { status: Option<ExecStatus> },
}
