//! Every number that bounds the protocol: sizes, counts, windows, times, ports.
//! They stand together because a peer has to know all of them and none may be changed alone.

use std::time::Duration;

/// The protocol version spoken by this build. Both ends must share a version.
pub const VERSION: u16 = 1;

/// The vsock port the agent listens on.
pub const AGENT_PORT: u32 = 1024;
/// The vsock port on the host that the agent dials once, when it is ready.
pub const READY_PORT: u32 = 1025;
/// The vsock port that also takes freeze, refresh and thaw.
pub const CONTROL_PORT: u32 = 1026;
/// The host's vsock address.
pub const HOST_CID: u32 = 2;

/// Largest payload of a data frame.
pub const MAX_DATA: usize = 64 << 10;
/// Largest payload of an `Open` or `Done` frame.
pub const MAX_CONTROL: usize = 1 << 20;
/// Largest payload of any other frame.
pub const MAX_SMALL: usize = 64 << 10;
/// How deep a MessagePack payload may nest.
pub const MAX_DEPTH: usize = 16;

/// What a client may send on a stream's input before the agent grants more.
pub const INPUT_WINDOW: u32 = 128 << 10;
/// What the agent may send on each output channel of a stream before the client grants more.
pub const OUTPUT_WINDOW: u32 = 256 << 10;
/// What a receiver lets be on its way of a file or an archive, once more than a little of it has come. Where
/// every switch between two threads costs, few large steps are quicker than many small ones.
pub const FILE_WINDOW: u32 = 1 << 20;
/// No grant may lift a window above this.
pub const MAX_WINDOW: u32 = 16 << 20;

/// Connections the agent serves at once.
pub const MAX_CONNECTIONS: usize = 256;
/// Streams open at once on one connection, those to ports not counted.
pub const MAX_STREAMS: usize = 256;
/// Streams to ports of the guest open at once on one connection.
pub const MAX_PORT_STREAMS: usize = 1024;
/// Watches of directories at once; each holds a thread.
pub const MAX_WATCHERS: usize = 32;
/// Directories of one watch.
pub const MAX_WATCHED: usize = 8192;
/// Interpreter sessions at once.
pub const MAX_SESSIONS: usize = 64;
/// Longest code of one call.
pub const MAX_CODE: usize = 900 << 10;
/// Longest name of a session.
pub const MAX_SESSION_NAME: usize = 64;
/// Threads that do file work at once; more requests wait their turn.
pub const MAX_FILE_WORKERS: usize = 128;
/// Names, values, arguments and their terminators, together.
pub const MAX_ARGS: usize = 768 << 10;
/// Longest MessagePack map of one directory entry.
pub const MAX_ENTRY: usize = 16 << 10;
/// Longest path, as the kernel has it.
pub const MAX_PATH: usize = 4095;
/// Longest tail of capped output that the agent will hold back.
pub const MAX_TAIL: u32 = 256 << 10;
/// Longest time limit of an exec (a year), so that sums of deadlines never overflow.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(366 * 24 * 3600);

/// How long a hello that has begun may take to arrive in full.
pub const HELLO_TIME: Duration = Duration::from_secs(10);
/// How long a client may take to say anything.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(60);
/// How long a frame that has begun may take to arrive in full.
pub const FRAME_TIME: Duration = Duration::from_secs(30);
/// How long an interpreter may take to start.
pub const SESSION_TIME: Duration = Duration::from_secs(60);
/// How long code may take to heed an interrupt, unless the request says otherwise.
pub const INTERRUPT_GRACE: Duration = Duration::from_secs(5);
/// How long a port of the guest may take to accept a connection.
pub const CONNECT_TIME: Duration = Duration::from_secs(10);
/// Between the TERM and the KILL of a timed-out exec, unless the request says otherwise.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(2);
/// How long output is still awaited when a background child keeps a pipe of a dead process.
pub const DRAIN_TIME: Duration = Duration::from_millis(200);
/// How long a freeze may take, unless the request says otherwise.
pub const FREEZE_TIME: Duration = Duration::from_secs(10);

/// Random bytes that a refresh must bring, at least and at most.
pub const MIN_ENTROPY: usize = 32;
pub const MAX_ENTROPY: usize = 512;
/// Network interfaces, addresses on each, name servers and secrets of one refresh.
pub const MAX_INTERFACES: usize = 16;
pub const MAX_ADDRESSES: usize = 32;
pub const MAX_SECRETS: usize = 256;
/// Longest host name, as the kernel has it.
pub const MAX_HOSTNAME: usize = 64;
/// Longest name of a network interface, as the kernel has it.
pub const MAX_INTERFACE_NAME: usize = 15;

/// Kills for lack of memory that are remembered.
pub const MAX_OOM_EVENTS: usize = 32;
/// The least memory an exec may be limited to: less holds no program.
pub const MIN_MEMORY: u64 = 1 << 20;

/// Detached processes that are remembered, running or ended.
pub const MAX_DETACHED: usize = 64;
/// Of each of their outputs, bytes kept unless the exec says otherwise, and at most.
pub const DEFAULT_KEEP: u32 = 256 << 10;
pub const MAX_KEEP: u32 = 4 << 20;
