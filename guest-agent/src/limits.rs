//! Every number that bounds the protocol: sizes, counts, windows, times, ports.
//!
//! They are kept together because a peer has to know all of them and none may be changed alone.

use std::time::Duration;

/// The protocol version of this build. Both ends must share a version.
pub const VERSION: u16 = 1;

/// The vsock port the agent listens on.
pub const AGENT_PORT: u32 = 1024;
/// The vsock port on the host that the agent connects to once, when it is ready.
pub const READY_PORT: u32 = 1025;
/// The vsock port that also serves freeze, refresh and thaw.
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

/// Bytes that a client may send on a stream's input before the agent grants more.
pub const INPUT_WINDOW: u32 = 128 << 10;
/// Bytes that the agent may send on each output channel of a stream before the client grants more.
pub const OUTPUT_WINDOW: u32 = 256 << 10;
/// The window of a file or an archive, once more than a little of it was received. Where every
/// switch between two threads is expensive, few large steps are faster than many small ones.
pub const FILE_WINDOW: u32 = 1 << 20;
/// The largest window that grants may add up to.
pub const MAX_WINDOW: u32 = 16 << 20;

/// The most connections that the agent serves at once.
pub const MAX_CONNECTIONS: usize = 256;
/// The most open streams of one connection, streams to ports not counted.
pub const MAX_STREAMS: usize = 256;
/// The most open streams to ports of the guest on one connection.
pub const MAX_PORT_STREAMS: usize = 1024;
/// The most watches of directories at once; each holds a thread.
pub const MAX_WATCHERS: usize = 32;
/// The most directories of one watch.
pub const MAX_WATCHED: usize = 8192;
/// The most interpreter sessions at once.
pub const MAX_SESSIONS: usize = 64;
/// Longest code of one call.
pub const MAX_CODE: usize = 900 << 10;
/// Longest name of a session.
pub const MAX_SESSION_NAME: usize = 64;
/// The most threads that do file work at once; more requests wait.
pub const MAX_FILE_WORKERS: usize = 128;
/// The total size of names, values, arguments and their terminators.
pub const MAX_ARGS: usize = 768 << 10;
/// Longest MessagePack map of one directory entry.
pub const MAX_ENTRY: usize = 16 << 10;
/// Longest path, as the kernel has it.
pub const MAX_PATH: usize = 4095;
/// Longest tail of capped output that the agent keeps back.
pub const MAX_TAIL: u32 = 256 << 10;
/// Longest time limit of an exec (a year), so that sums of deadlines never overflow.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(366 * 24 * 3600);

/// The time limit of a hello, from its first byte.
pub const HELLO_TIME: Duration = Duration::from_secs(10);
/// The time limit of a client's first byte.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(60);
/// The time limit of a frame, from its first byte.
pub const FRAME_TIME: Duration = Duration::from_secs(30);
/// The time limit of an interpreter's start.
pub const SESSION_TIME: Duration = Duration::from_secs(60);
/// The default time between the interrupt of code and the end of its session.
pub const INTERRUPT_GRACE: Duration = Duration::from_secs(5);
/// The time limit for a port of the guest to accept a connection.
pub const CONNECT_TIME: Duration = Duration::from_secs(10);
/// The default time between the SIGTERM and the SIGKILL of a timed-out exec.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(2);
/// How long output is awaited when a background child holds a pipe of a dead process.
pub const DRAIN_TIME: Duration = Duration::from_millis(200);
/// The default time limit of a freeze.
pub const FREEZE_TIME: Duration = Duration::from_secs(10);

/// The least and the most random bytes of a refresh.
pub const MIN_ENTROPY: usize = 32;
pub const MAX_ENTROPY: usize = 512;
/// The most network interfaces, addresses on each, name servers and secrets of one refresh.
pub const MAX_INTERFACES: usize = 16;
pub const MAX_ADDRESSES: usize = 32;
pub const MAX_SECRETS: usize = 256;
/// Longest certificate of an authority, and most variables that come with it.
pub const MAX_CERTIFICATE: usize = 16 << 10;
pub const MAX_TRUST_ENV: usize = 256;
/// Longest host name, as the kernel has it.
pub const MAX_HOSTNAME: usize = 64;
/// Longest name of a network interface, as the kernel has it.
pub const MAX_INTERFACE_NAME: usize = 15;

/// The most remembered kills for lack of memory.
pub const MAX_OOM_EVENTS: usize = 32;
/// The least memory an exec may be limited to: less holds no program.
pub const MIN_MEMORY: u64 = 1 << 20;

/// The most remembered detached processes, running or ended.
pub const MAX_DETACHED: usize = 64;
/// The default and the most bytes kept of each output of a detached process.
pub const DEFAULT_KEEP: u32 = 256 << 10;
pub const MAX_KEEP: u32 = 4 << 20;
