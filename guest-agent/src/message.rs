//! The messages inside control frames, as MessagePack maps with named fields.
//! Bytes that the guest's kernel treats as bytes (arguments, paths, names) stay bytes here.

mod code;
mod detached;
mod fresh;
mod metrics;

use serde::{Deserialize, Serialize};
pub use serde_bytes::ByteBuf;

pub use code::{CloseSession, Language, OpenSession, RunCode, RunReport, RunStatus, SessionInfo};
pub use detached::{Attach, Detach, Detached, Kept, ProcessId, ProcessInfo, Replay, SignalProcess};
pub use fresh::{Counter, FailedStep, Freeze, Frozen, Interface, Refresh, RefreshStep, Refreshed};
pub use metrics::{Limits, Metrics, OomEvent};

/// `Hello`: who the client is and which versions it speaks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub min_version: u16,
    pub max_version: u16,
    #[serde(default)]
    pub client: String,
}

/// `Welcome`: the version chosen and facts about the agent.
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

/// `Open`: what a stream is for.
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

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// A program, found along PATH unless it has a slash, and its arguments.
    Argv(Vec<ByteBuf>),
    /// A line for `/bin/sh -c`.
    Shell(ByteBuf),
}

/// Runs a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    pub command: Command,
    /// Added to the agent's small default environment, later names winning.
    #[serde(default)]
    pub env: Vec<(ByteBuf, ByteBuf)>,
    /// Leave the default environment out.
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
    /// Let the process go on without its client; the answer is its id.
    #[serde(default)]
    pub detach: Option<Detach>,
    /// What it and all it starts may use together.
    #[serde(default)]
    pub limits: Option<Limits>,
}

impl Exec {
    /// A command and nothing else asked for.
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

/// The size of a terminal, in characters. `Resize` has the same form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowSize {
    pub rows: u16,
    pub columns: u16,
}

/// Of each output, how much is sent: the first bytes, and the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputLimit {
    pub head: u64,
    pub tail: u32,
}

/// Reads a regular file or a device on the output channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadFile {
    pub path: ByteBuf,
    #[serde(default)]
    pub offset: u64,
    /// At most this many bytes; to the end without it.
    #[serde(default)]
    pub len: Option<u64>,
    /// Send segments, with holes told apart: see `sparse.rs`.
    #[serde(default)]
    pub sparse: bool,
}

/// Writes a file from the input channel, whose end commits it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteFile {
    pub path: ByteBuf,
    #[serde(default)]
    pub mode: Option<u32>,
    #[serde(default)]
    pub owner: Option<Owner>,
    /// Make missing parent directories.
    #[serde(default)]
    pub parents: bool,
    /// Write into the existing file instead of replacing it as a whole.
    #[serde(default)]
    pub in_place: bool,
    /// With `in_place`: begin here and keep what lies beyond.
    #[serde(default)]
    pub offset: Option<u64>,
    /// Wait until the contents are on the disk.
    #[serde(default)]
    pub sync: bool,
    /// Segments come instead of plain bytes; not with `in_place`.
    #[serde(default)]
    pub sparse: bool,
}

/// Numeric owner of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// Asks for a file's metadata.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stat {
    pub path: ByteBuf,
    /// Follow a symbolic link at the end of the path.
    #[serde(default)]
    pub follow: bool,
}

/// Sends a directory's entries on the output channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    pub path: ByteBuf,
}

/// Removes a file or directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remove {
    pub path: ByteBuf,
    #[serde(default)]
    pub recursive: bool,
    /// Succeed when there is nothing to remove.
    #[serde(default)]
    pub missing_ok: bool,
}

/// Makes a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mkdir {
    pub path: ByteBuf,
    #[serde(default)]
    pub mode: Option<u32>,
    /// Make missing parents, and succeed when the directory is there.
    #[serde(default)]
    pub parents: bool,
}

/// Makes a symbolic link, in the place of a file or link of that name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Symlink {
    pub path: ByteBuf,
    /// What it holds; any bytes but NUL.
    pub target: ByteBuf,
    #[serde(default)]
    pub owner: Option<Owner>,
}

/// Tells of changes in a directory, or with `recursive` in the tree below it, until it is cancelled. The
/// output channel is a row of `WatchEvent`s, each after its length, as a listing's entries are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watch {
    pub path: ByteBuf,
    #[serde(default)]
    pub recursive: bool,
}

/// A change below a watched directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    pub change: Change,
    /// Relative to the watched directory; empty for itself.
    pub path: ByteBuf,
    #[serde(default)]
    pub directory: bool,
    /// The same in a `MovedFrom` and the `MovedTo` that belongs to it.
    #[serde(default)]
    pub cookie: u32,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Created,
    Modified,
    /// Closed by somebody who had it open for writing.
    Written,
    Attributes,
    Deleted,
    MovedFrom,
    MovedTo,
    /// The kernel lost events: look for yourself.
    Overflow,
    /// The watched directory is no longer there; nothing follows.
    Gone,
    #[serde(other)]
    Other,
}

/// Sends the tree at a directory as a tar archive on the output channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadTar {
    pub path: ByteBuf,
}

/// Unpacks a tar archive from the input channel into a directory, which is made if it is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteTar {
    pub path: ByteBuf,
    /// Files belong to whom the archive says; without it, to the agent's user.
    #[serde(default)]
    pub owners: bool,
}

/// Renames within one filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    pub from: ByteBuf,
    pub to: ByteBuf,
    /// Fail when the target exists.
    #[serde(default)]
    pub no_replace: bool,
}

/// Connects to a TCP port of the guest's loopback. After `Started` the input channel is what is
/// written to the connection and the output channel what is read from it; END closes one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connect {
    pub port: u16,
}

/// Ends the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shutdown {
    pub how: ShutdownHow,
    /// What processes get between TERM and KILL.
    #[serde(default)]
    pub grace_ms: Option<u64>,
}

/// How a guest ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShutdownHow {
    Poweroff,
    Reboot,
}

/// `Started`: the request is under way.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// Exec: the process.
    #[serde(default)]
    pub pid: Option<u32>,
    /// ReadFile: what is being read.
    #[serde(default)]
    pub metadata: Option<Metadata>,
    /// Attach: where the output begins.
    #[serde(default)]
    pub replay: Option<Replay>,
}

/// `Signal`: a signal number and whom it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signal {
    pub signal: i32,
    #[serde(default)]
    pub scope: Scope,
}

/// Who gets a signal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// The process group the exec began with.
    #[default]
    Group,
    /// Only the process that was started.
    Process,
    /// Every process that descends from it.
    Tree,
}

/// `Done`: how a stream ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Ok(Answer),
    Failed(Failure),
}

/// The answer to a request that was carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Exec(ExecReport),
    /// ReadFile, WriteFile: bytes moved. List: entries sent.
    Transferred(u64),
    Metadata(Metadata),
    Info(Info),
    Metrics(Metrics),
    Frozen(Frozen),
    Refreshed(Refreshed),
    Session(SessionInfo),
    Sessions(Vec<SessionInfo>),
    Run(RunReport),
    Detached(Detached),
    Processes(Vec<ProcessInfo>),
    /// Everything that has nothing else to tell.
    Done {},
}

/// Why a request was not carried out.
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

/// The kinds of failure, of a stream or of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The request says something that can never work.
    BadRequest,
    /// This agent does not do that, or not here.
    Unsupported,
    /// A cap on connections or streams is reached; try again later.
    TooMany,
    /// The kernel refused; `errno` and `path` say more.
    Io,
    /// Something else is under way there; try again when it is over.
    Busy,
    /// The client cancelled.
    Cancelled,
    /// The workload is frozen: thaw it first.
    Frozen,
    /// The guest is going down.
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

/// How an exec ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecReport {
    pub status: ExecStatus,
    /// The time limit ended it.
    #[serde(default)]
    pub timed_out: bool,
    /// A background child still held an output when the streams were closed.
    #[serde(default)]
    pub background: bool,
    /// It, or something it started, was killed for lack of memory.
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

/// What became of the process itself.
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
    /// Making pipes or a control group.
    Prepare,
    /// Limiting what it may use.
    Limits,
    /// Looking the user or group up.
    User,
    /// Making the process.
    Fork,
    /// Joining standard input and outputs.
    Stdio,
    /// Becoming the user.
    Credentials,
    /// Entering the working directory.
    Chdir,
    /// Executing the program.
    Exec,
    /// A step of a later version.
    #[serde(other)]
    Other,
}

/// Bytes of one output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputCount {
    /// Bytes the process wrote.
    pub total: u64,
    /// Bytes left out after the head and before the tail.
    pub dropped: u64,
}

/// Resources a process and its waited-for children used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub user_us: u64,
    pub system_us: u64,
    pub max_rss_kib: u64,
}

/// What kind of file something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
    #[serde(other)]
    Other,
}

/// A file's metadata.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    pub kind: FileKind,
    /// Permission bits, set-id bits and sticky bit.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub nlink: u64,
    pub mtime_s: i64,
    pub mtime_ns: u32,
    /// Of a symbolic link, what it holds.
    #[serde(default)]
    pub target: Option<ByteBuf>,
}

/// One directory entry. A listing's output channel is a row of these, each after its length (u32,
/// little-endian); frames may cut them anywhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub name: ByteBuf,
    pub metadata: Metadata,
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
    /// Execs that run now, on all connections.
    pub execs: u32,
    pub connections: u32,
    /// Whether each exec has its own control group.
    pub cgroups: bool,
    /// Of the last refresh; zero before the first.
    #[serde(default)]
    pub generation: u64,
    /// Whether the workload stands still.
    #[serde(default)]
    pub frozen: bool,
}
