//! The messages inside control frames, as MessagePack maps with named fields.
//!
//! Values that the guest's kernel treats as bytes (arguments, paths, names) stay bytes here.

mod code;
mod detached;
mod exec;
mod files;
mod fresh;
mod metrics;

use serde::{Deserialize, Serialize};
pub use serde_bytes::ByteBuf;

pub use code::{CloseSession, Language, OpenSession, RunCode, RunReport, RunStatus, SessionInfo};
pub use detached::{Attach, Detach, Detached, Kept, ProcessId, ProcessInfo, Replay, SignalProcess};
pub use exec::{
    Command, Exec, ExecReport, ExecStatus, OutputCount, OutputLimit, Scope, Signal, Stage, Usage,
    WindowSize,
};
pub use files::{
    Change, DirEntry, FileKind, List, Metadata, Mkdir, Move, Owner, ReadFile, ReadTar, Remove,
    Stat, Symlink, Watch, WatchEvent, WriteFile, WriteTar,
};
pub use fresh::{
    Counter, FailedStep, Freeze, FrozenWorkload, Interface, Refresh, RefreshStep, Refreshed, Trust,
};
pub use metrics::{Limits, Metrics, OomEvent};

/// `Hello`: the client and the versions it supports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub min_version: u16,
    pub max_version: u16,
    #[serde(default)]
    pub client: String,
}

/// `Welcome`: the chosen version and facts about the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    pub version: u16,
    #[serde(default)]
    pub capabilities: Vec<String>,
    /// The agent's own version.
    #[serde(default)]
    pub agent: String,
    #[serde(default)]
    pub kernel: String,
    /// Whether the agent is the guest's first process.
    #[serde(default)]
    pub init: bool,
    /// Guest time since boot.
    #[serde(default)]
    pub uptime_us: u64,
}

/// `Goodbye`: why the connection ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Goodbye {
    pub code: Code,
    #[serde(default)]
    pub message: String,
}

/// `Open`: the request that a stream is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    Exec(Exec),
    ReadFile(ReadFile),
    WriteFile(WriteFile),
    Stat(Stat),
    List(List),
    Remove(Remove),
    Mkdir(Mkdir),
    Move(Move),
    Symlink(Symlink),
    Watch(Watch),
    ReadTar(ReadTar),
    WriteTar(WriteTar),
    Connect(Connect),
    OpenSession(OpenSession),
    RunCode(RunCode),
    CloseSession(CloseSession),
    ListSessions {},
    Shutdown(Shutdown),
    Freeze(Freeze),
    Refresh(Box<Refresh>),
    Thaw {},
    Processes {},
    Attach(Attach),
    SignalProcess(SignalProcess),
    ForgetProcess(ProcessId),
    Metrics {},
    Info {},
    Ping {},
}

/// Connects to a TCP port of the guest's loopback. After `Started` the input channel is written to
/// the connection and the output channel is read from it; END closes one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connect {
    pub port: u16,
}

/// Shuts the guest down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shutdown {
    pub how: ShutdownHow,
    /// The time that processes get between SIGTERM and SIGKILL.
    #[serde(default)]
    pub grace_ms: Option<u64>,
}

/// How a guest shuts down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShutdownHow {
    Poweroff,
    Reboot,
}

/// `Started`: the request is being carried out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// Exec: the process id.
    #[serde(default)]
    pub pid: Option<u32>,
    /// ReadFile: the metadata of the file.
    #[serde(default)]
    pub metadata: Option<Metadata>,
    /// Attach: the offsets at which the output begins.
    #[serde(default)]
    pub replay: Option<Replay>,
}

/// `Done`: how a stream ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Ok(Answer),
    Failed(Failure),
}

impl Outcome {
    /// Makes the outcome of a request that failed, without a path.
    pub fn failed(code: Code, errno: Option<i32>, message: impl Into<String>) -> Self {
        Self::Failed(Failure { code, errno, path: None, message: message.into() })
    }
}

/// The answer to a request that was carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Exec(ExecReport),
    /// ReadFile, WriteFile: the number of bytes transferred. List: the number of entries sent.
    Transferred(u64),
    Metadata(Metadata),
    Info(Info),
    Metrics(Metrics),
    Frozen(FrozenWorkload),
    Refreshed(Refreshed),
    Session(SessionInfo),
    Sessions(Vec<SessionInfo>),
    Run(RunReport),
    Detached(Detached),
    Processes(Vec<ProcessInfo>),
    /// The request was carried out and has no result.
    Done {},
}

/// The reason why a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub code: Code,
    #[serde(default)]
    pub errno: Option<i32>,
    #[serde(default)]
    pub path: Option<ByteBuf>,
    #[serde(default)]
    pub message: String,
}

/// The kinds of failure of a stream or of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The request can never work.
    BadRequest,
    /// This agent does not support the request, or not in this guest.
    Unsupported,
    /// A limit on connections or streams is reached; try again later.
    TooMany,
    /// The kernel refused; `errno` and `path` say more.
    Io,
    /// Another operation is in progress there; try again when it is over.
    Busy,
    /// The client cancelled.
    Cancelled,
    /// The workload is frozen: thaw it first.
    Frozen,
    /// The guest is shutting down.
    ShuttingDown,
    /// No common protocol version.
    Version,
    /// The peer broke the protocol.
    Protocol,
    /// A peer was silent for too long.
    Silent,
    /// A code of a later version.
    #[serde(other)]
    Other,
}

/// Facts about the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    pub agent: String,
    pub kernel: String,
    pub hostname: String,
    pub uptime_us: u64,
    pub cpus: u32,
    pub memory_total_kib: u64,
    pub memory_available_kib: u64,
    /// Running execs, on all connections.
    pub execs: u32,
    pub connections: u32,
    /// Whether each exec has its own control group.
    pub cgroups: bool,
    /// The generation of the last refresh; zero before the first.
    #[serde(default)]
    pub generation: u64,
    /// Whether the workload is frozen.
    #[serde(default)]
    pub frozen: bool,
}
