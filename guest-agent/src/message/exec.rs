//! Messages about processes that a stream is for: what to run, signals, how it ended.

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use super::{Detach, Limits};

/// The command of an exec.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// A program, found in PATH unless it contains a slash, and its arguments.
    Argv(Vec<ByteBuf>),
    /// A line for `/bin/sh -c`.
    Shell(ByteBuf),
}

/// Runs a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    pub command: Command,
    /// Added to the agent's small default environment; later names override earlier ones.
    #[serde(default)]
    pub env: Vec<(ByteBuf, ByteBuf)>,
    /// Leave out the default environment.
    #[serde(default)]
    pub clear_env: bool,
    #[serde(default)]
    pub cwd: Option<ByteBuf>,
    /// `name`, `uid`, `name:group` or `uid:gid`.
    #[serde(default)]
    pub user: Option<String>,
    /// Standard input comes over the input channel; otherwise it is empty.
    #[serde(default)]
    pub stdin: bool,
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    #[serde(default)]
    pub grace_ms: Option<u64>,
    #[serde(default)]
    pub output_limit: Option<OutputLimit>,
    /// Standard input and both outputs are a terminal of this size.
    #[serde(default)]
    pub pty: Option<WindowSize>,
    /// Let the process continue without its client; the answer is its id.
    #[serde(default)]
    pub detach: Option<Detach>,
    /// Limits on what the process and all processes it starts use together.
    #[serde(default)]
    pub limits: Option<Limits>,
}

impl Exec {
    /// Makes a request with a command and defaults for everything else.
    pub fn new(command: Command) -> Self {
        Self {
            command,
            env: Vec::new(),
            clear_env: false,
            cwd: None,
            user: None,
            stdin: false,
            timeout_ms: None,
            grace_ms: None,
            output_limit: None,
            pty: None,
            detach: None,
            limits: None,
        }
    }
}

/// The size of a terminal, in characters. It is also the payload of `Resize`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    pub rows: u16,
    pub columns: u16,
}

/// The number of first and last bytes that are sent of each output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputLimit {
    pub head: u64,
    pub tail: u32,
}

/// `Signal`: a signal number and its receivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signal {
    pub signal: i32,
    #[serde(default)]
    pub scope: Scope,
}

/// The receivers of a signal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// The process group the exec began with.
    #[default]
    Group,
    /// Only the process that was started.
    Process,
    /// Every descendant of the process, and itself.
    Tree,
}

/// How an exec ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecReport {
    pub status: ExecStatus,
    /// The time limit ended the process.
    #[serde(default)]
    pub timed_out: bool,
    /// A background child still held an output when the streams were closed.
    #[serde(default)]
    pub background: bool,
    /// The process, or one that it started, was killed for lack of memory.
    #[serde(default)]
    pub oom: bool,
    #[serde(default)]
    pub stdout: OutputCount,
    #[serde(default)]
    pub stderr: OutputCount,
    #[serde(default)]
    pub duration_us: u64,
    #[serde(default)]
    pub usage: Usage,
}

/// How the process itself ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExecStatus {
    Exited { code: i32 },
    Signaled { signal: i32, core_dumped: bool },
    CouldNotStart { stage: Stage, errno: i32 },
}

/// The step at which starting a process failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Creating pipes or a control group.
    Prepare,
    /// Applying resource limits.
    Limits,
    /// Looking up the user or group.
    User,
    /// Creating the process.
    Fork,
    /// Connecting standard input and outputs.
    Stdio,
    /// Switching to the user.
    Credentials,
    /// Entering the working directory.
    Chdir,
    /// Executing the program.
    Exec,
    /// A step of a later version.
    #[serde(other)]
    Other,
}

/// The byte counts of one output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputCount {
    /// Bytes the process wrote.
    pub total: u64,
    /// Bytes left out after the head and before the tail.
    pub dropped: u64,
}

/// Resources used by a process and its waited-for children.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub user_us: u64,
    pub system_us: u64,
    pub max_rss_kib: u64,
}
