//! Connects a VM's vsock socket to an agent: connect, `CONNECT port`, hello, welcome.
//!
//! One deadline bounds all reads, and none reads a byte beyond its message.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use pvmm_guest_agent::frame::{HEADER_LEN, Header};
use pvmm_guest_agent::limits::VERSION;
use pvmm_guest_agent::message::{Code, Goodbye, Hello, Welcome};
use pvmm_guest_agent::{Kind, decode, encode};
use rustix::io::retry_on_intr;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::error::AgentError;
use crate::trace;

/// The longest accepted answer to `CONNECT`.
const MAX_LINE: usize = 32;
/// The pauses between two attempts while the agent is not listening.
const FIRST_REST: Duration = Duration::from_millis(5);
const LONGEST_REST: Duration = Duration::from_millis(100);
/// How long the agent may take to welcome a first connection; twice as long for each later one. A
/// guest that is slow to notice its restore accepts a connection and drops it with the old ones,
/// and nobody tells this end.
const FIRST_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 5_000 });

/// Connects to the agent on a port; while it is not listening, or does not welcome the connection,
/// retries until the deadline. `more` is sent right after the hello, and the agent acts on it once
/// it has sent its welcome; an agent that is slow to welcome may act on it twice.
pub fn connect(
    uds: &Path,
    port: u32,
    more: &[u8],
    deadline: Instant,
) -> Result<(UnixStream, Welcome), AgentError> {
    let mut words = format!("CONNECT {port}\n").into_bytes();
    append_hello(&mut words)?;
    words.extend_from_slice(more);
    let (mut rest, mut patience) = (FIRST_REST, FIRST_PATIENCE);
    loop {
        let path = || uds.to_owned();
        let socket = match dial(uds, deadline) {
            Ok(socket) => socket,
            // There was a first attempt, and the time has passed since.
            Err(error) if error.kind() == ErrorKind::TimedOut && rest > FIRST_REST => {
                return Err(AgentError::NotListening { path: path() });
            }
            Err(source) => return Err(AgentError::Dial { path: path(), source }),
        };
        trace::step("dial");
        if ask_for_port(&socket, &words, deadline).is_ok() {
            trace::step("connected");
            let by = deadline.min(Instant::now() + patience);
            patience *= 2;
            match read_greeting(&socket, by) {
                // The agent closed the connection at once, as if it were not listening yet.
                Err(AgentError::Handshake(GONE)) => {}
                Err(AgentError::Handshake(LATE)) if by < deadline => {}
                greeted => return greeted.map(|welcome| (socket, welcome)),
            }
        }
        if Instant::now() + rest >= deadline {
            return Err(AgentError::NotListening { path: path() });
        }
        std::thread::sleep(rest);
        rest = (rest * 2).min(LONGEST_REST);
    }
}

const GONE: &str = "the connection was closed";
const LATE: &str = "the agent was silent for too long";

/// Sends a hello and reads the welcome.
pub fn handshake(socket: &UnixStream, deadline: Instant) -> Result<Welcome, AgentError> {
    let mut frame = Vec::new();
    append_hello(&mut frame)?;
    limit_write(socket, deadline).map_err(|_| AgentError::Handshake("no time was left"))?;
    { socket }.write_all(&frame).map_err(|_| AgentError::Handshake(GONE))?;
    read_greeting(socket, deadline)
}

fn append_hello(frame: &mut Vec<u8>) -> Result<(), AgentError> {
    let hello = Hello { min_version: VERSION, max_version: VERSION, client: "pvmm".to_owned() };
    encode(frame, Kind::Hello, 0, &hello).map_err(AgentError::Encode)
}

fn read_greeting(socket: &UnixStream, deadline: Instant) -> Result<Welcome, AgentError> {
    let welcome = read_welcome(socket, deadline)?;
    if welcome.version != VERSION {
        return Err(AgentError::Version(format!("it chose {}", welcome.version)));
    }
    Ok(welcome)
}

/// Reads one frame, which must be a welcome.
pub fn read_welcome(socket: &UnixStream, deadline: Instant) -> Result<Welcome, AgentError> {
    let mut header = [0; HEADER_LEN];
    read_exact(socket, &mut header, deadline)?;
    let header = Header::parse(&header).map_err(|_| AgentError::Handshake("a malformed frame"))?;
    if !matches!(header.kind, Kind::Welcome | Kind::Goodbye) {
        return Err(AgentError::Handshake("its first frame is no welcome"));
    }
    // The header is checked: the length is at most 64 KiB.
    let mut payload = vec![0; header.len as usize];
    read_exact(socket, &mut payload, deadline)?;
    if header.kind == Kind::Goodbye {
        let goodbye: Goodbye =
            decode(&payload).map_err(|_| AgentError::Handshake("a malformed goodbye"))?;
        return Err(match goodbye.code {
            Code::Version => AgentError::Version(goodbye.message.chars().take(100).collect()),
            Code::TooMany => AgentError::TooMany,
            Code::Silent => AgentError::Handshake("this end was too slow with its hello"),
            _ => AgentError::Handshake("the agent said goodbye"),
        });
    }
    decode(&payload).map_err(|_| AgentError::Handshake("a malformed welcome"))
}

/// Asks the VMM to connect the socket to the agent's port, and sends the first bytes for the agent.
fn ask_for_port(mut socket: &UnixStream, words: &[u8], deadline: Instant) -> io::Result<()> {
    limit_write(socket, deadline)?;
    socket.write_all(words)?;
    let (mut line, mut len) = ([0; MAX_LINE], 0);
    while len < MAX_LINE {
        limit_read(socket, deadline)?;
        // The bytes after the line belong to the agent, so no more than the line is read.
        let seen = peek(socket, &mut line[len..])?;
        let end = line[len..len + seen].iter().position(|byte| *byte == b'\n');
        let count = end.map_or(seen, |end| end + 1);
        socket.read_exact(&mut line[len..len + count])?;
        len += count;
        if end.is_some() {
            let number = line[..len - 1].strip_prefix(b"OK ").filter(|rest| !rest.is_empty());
            let valid = number.is_some_and(|rest| rest.iter().all(u8::is_ascii_digit));
            return if valid { Ok(()) } else { Err(ErrorKind::InvalidData.into()) };
        }
    }
    Err(ErrorKind::InvalidData.into())
}

/// Waits for bytes and returns how many there are, without taking them from the socket.
fn peek(socket: &UnixStream, bytes: &mut [u8]) -> io::Result<usize> {
    match retry_on_intr(|| rustix::net::recv(socket, &mut *bytes, RecvFlags::PEEK))? {
        (0, _) => Err(ErrorKind::UnexpectedEof.into()),
        (count, _) => Ok(count),
    }
}

fn read_exact(
    mut socket: &UnixStream,
    mut bytes: &mut [u8],
    deadline: Instant,
) -> Result<(), AgentError> {
    while !bytes.is_empty() {
        limit_read(socket, deadline).map_err(|_| AgentError::Handshake(LATE))?;
        match socket.read(bytes) {
            Ok(0) => return Err(AgentError::Handshake(GONE)),
            Ok(count) => bytes = &mut bytes[count..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Err(AgentError::Handshake(LATE)),
            Err(_) => return Err(AgentError::Handshake(GONE)),
        }
    }
    Ok(())
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn limit_read(socket: &UnixStream, deadline: Instant) -> io::Result<()> {
    socket.set_read_timeout(Some(left(deadline)?))
}

fn limit_write(socket: &UnixStream, deadline: Instant) -> io::Result<()> {
    socket.set_write_timeout(Some(left(deadline)?))
}

/// Connects to a Unix socket. A listener whose queue is full blocks a plain connect forever; the
/// write timeout, set before, bounds it.
fn dial(path: &Path, deadline: Instant) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    let socket = UnixStream::from(socket);
    limit_write(&socket, deadline)?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}
