//! Messages of interpreter sessions: open, run, close, list.
//! They are apart because the rest of the protocol knows nothing of languages.

use serde::{Deserialize, Serialize};

use super::{ByteBuf, ExecStatus, OutputCount};

/// A language that has interpreter sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Language {
    Python,
    Node,
}

/// Starts an interpreter that keeps its state from one `RunCode` to the next, whoever sends them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenSession {
    pub language: Language,
    /// What to call it; the agent finds a name without one.
    #[serde(default)]
    pub session: Option<String>,
    /// Give the session of that name if there is one, instead of failing with EEXIST.
    #[serde(default)]
    pub reuse: bool,
    /// Another program than `python3` or `node`.
    #[serde(default)]
    pub program: Option<ByteBuf>,
    #[serde(default)]
    pub env: Vec<(ByteBuf, ByteBuf)>,
    #[serde(default)]
    pub cwd: Option<ByteBuf>,
    #[serde(default)]
    pub user: Option<String>,
}

/// Runs code in a session. The output channel is a row of records: see `session.rs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunCode {
    pub session: String,
    pub code: ByteBuf,
    /// Afterwards the code is interrupted, and the session goes on.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    /// Between the interrupt and the end of the session, if the code does not heed it.
    #[serde(default)]
    pub grace_ms: Option<u64>,
    /// Of each of the two outputs, how many bytes are sent.
    #[serde(default)]
    pub output_limit: Option<u64>,
}

/// Ends a session and everything it started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CloseSession {
    pub session: String,
}

/// What a session is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionInfo {
    pub session: String,
    pub language: Language,
    /// The interpreter's own version.
    #[serde(default)]
    pub version: String,
    #[serde(default)]
    pub pid: u32,
    /// Code is running in it.
    #[serde(default)]
    pub busy: bool,
    /// Calls so far.
    #[serde(default)]
    pub runs: u64,
}

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunReport {
    pub status: RunStatus,
    /// The time limit interrupted it.
    #[serde(default)]
    pub timed_out: bool,
    #[serde(default)]
    pub stdout: OutputCount,
    #[serde(default)]
    pub stderr: OutputCount,
    /// Displays, results and errors left out because the client did not take them in time.
    #[serde(default)]
    pub dropped: u64,
    #[serde(default)]
    pub duration_us: u64,
    /// The how-manieth call of the session this was.
    #[serde(default)]
    pub run: u64,
}

/// What became of the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// It came to its end.
    Ok {},
    /// It threw; an error record says what.
    Error {},
    /// The interpreter ended, and the session with it.
    Died { status: Option<ExecStatus> },
}
