//! The outside of one command: joins this process's stdin, stdout, stderr and signals to frames.
//!
//! One loop that never blocks on a single stream, so that Ctrl-C works while a pager holds stdout
//! or a pipe holds stdin.

use std::env;
use std::ffi::OsString;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, UNIX_EPOCH};

use super::frame::{self, Kind, Outcome, Request, STDIN_WINDOW};
use crate::sys::{self, READABLE, WRITABLE, Waiting};

/// A pipe takes this much without blocking whenever it is writable.
const PIPE_ATOMIC: usize = 4096;

/// Output held for a slow reader before the host is no longer read.
const OUTPUT_LIMIT: usize = 256 << 10;

/// How long a command may take to end after the first signal that asks it to.
const SIGNAL_GRACE: Duration = Duration::from_secs(5);

/// Signals that arrive so close together are one.
const SAME_WISH: Duration = Duration::from_secs(1);

/// Signals that are passed on, and end the session when the command does not.
pub const ENDING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// Says that the terminal has another size now.
pub const RESIZED: i32 = libc::SIGWINCH;

/// How a session ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// The command's own exit code, or 128 plus its signal.
    Exited(u8),
    /// The host went away first. The command can be tried again only if it had read nothing.
    HostLost { stdin_used: bool },
}

/// The command as the host shall run it: these arguments, this directory, the variables that
/// mean the same inside.
pub fn request(argv: &[OsString]) -> io::Result<Request> {
    let cwd = env::current_dir()?;
    let mut env: Vec<(Vec<u8>, Vec<u8>)> = env::vars_os()
        .filter(|(name, _)| name.to_str().is_some_and(is_passed))
        .map(|(name, value)| (name.into_vec(), value.into_vec()))
        .collect();
    env.push((b"PVMM_NESTED_HOST".to_vec(), b"1".to_vec()));
    let argv = argv.iter().map(|a| a.as_bytes().to_vec()).collect();
    Ok(Request {
        argv,
        env,
        cwd: cwd.into_os_string().into_vec(),
        time_since_epoch: UNIX_EPOCH.elapsed().unwrap_or_default(),
        terminal: terminal(),
    })
}

/// The size of this process's terminal, if both stdin and stdout are one.
fn terminal() -> Option<sys::Size> {
    sys::terminal_size(io::stdin()).ok()?;
    sys::terminal_size(io::stdout()).ok()
}

fn is_passed(name: &str) -> bool {
    const NAMES: [&str; 9] =
        ["PATH", "HOME", "USER", "LOGNAME", "TERM", "LANG", "TZ", "CI", "FIRECRACKER_BIN"];
    const PREFIXES: [&str; 5] = ["CARGO_", "PVMM_", "XDG_", "RUST_", "LC_"];
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// One of this process's outputs, with what it has not taken yet.
struct Output<W> {
    to: Option<W>,
    waiting: Vec<u8>,
}

impl<W: Write + AsFd> Output<W> {
    fn new(to: W) -> Self {
        Output { to: Some(to), waiting: Vec::new() }
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.to.as_ref().filter(|_| !self.waiting.is_empty()).map(|to| to.as_fd())
    }

    fn add(&mut self, bytes: &[u8]) {
        if self.to.is_some() {
            self.waiting.extend_from_slice(bytes);
        }
    }

    /// Writes once. False when nobody reads this output any more.
    fn flush_some(&mut self) -> bool {
        let Some(to) = self.to.as_mut() else { return true };
        let chunk = &self.waiting[..self.waiting.len().min(PIPE_ATOMIC)];
        match to.write(chunk).and_then(|n| to.flush().map(|()| n)) {
            Ok(n) => {
                self.waiting.drain(..n);
                true
            }
            Err(e)
                if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
            {
                true
            }
            Err(_) => {
                self.to = None;
                self.waiting.clear();
                false
            }
        }
    }
}

/// Runs one command over `host` and returns how it ended, everything it wrote being written.
pub fn run(host: UnixStream, request: &Request, signals: &PipeReader) -> io::Result<End> {
    let mut host = host;
    host.set_nonblocking(true)?;
    let mut to_host = Vec::new();
    let payload = serde_json::to_vec(request).map_err(io::Error::other)?;
    frame::encode(&mut to_host, Kind::Open, &payload);

    // The command's own terminal interprets the keys, Ctrl-C among them.
    let _raw = request.terminal.map(|_| sys::RawTerminal::new(io::stdin())).transpose()?;
    let (mut stdout, mut stderr) = (Output::new(raw(1)?), Output::new(raw(2)?));
    let mut stdin = Some(raw(0)?);
    let mut from_host = Vec::new();
    let mut credit = STDIN_WINDOW;
    let mut stdin_used = false;
    let mut asked_to_end: Option<Instant> = None;
    let mut end = None;

    while end.is_none() || !stdout.waiting.is_empty() || !stderr.waiting.is_empty() {
        let room = stdout.waiting.len() + stderr.waiting.len() < OUTPUT_LIMIT;
        let host_events = if room && end.is_none() { READABLE } else { 0 }
            | if to_host.is_empty() { 0 } else { WRITABLE };
        let wants_stdin = credit > 0 && to_host.len() < STDIN_WINDOW && end.is_none();
        let [host_ready, in_ready, out_ready, err_ready, signalled] = sys::poll(
            [
                Waiting { fd: (host_events != 0).then(|| host.as_fd()), events: host_events },
                Waiting {
                    fd: stdin.as_ref().filter(|_| wants_stdin).map(|s| s.as_fd()),
                    events: READABLE,
                },
                Waiting { fd: stdout.fd(), events: WRITABLE },
                Waiting { fd: stderr.fd(), events: WRITABLE },
                Waiting { fd: Some(signals.as_fd()), events: READABLE },
            ],
            Some(Duration::from_secs(1)),
        )?;

        if signalled != 0 {
            for signal in pending(signals) {
                if i32::from(signal) == RESIZED {
                    if let Some((rows, columns)) = terminal() {
                        let payload = [rows.to_le_bytes(), columns.to_le_bytes()].concat();
                        frame::encode(&mut to_host, Kind::Resize, &payload);
                    }
                    continue;
                }
                // Whoever asks again a while later means it. Twice at once is one wish: a
                // terminal and a parent may both pass the same signal on.
                let again = asked_to_end.is_some_and(|at| at.elapsed() > SAME_WISH);
                let signal = if again { libc::SIGKILL as u8 } else { signal };
                asked_to_end.get_or_insert_with(Instant::now);
                frame::encode(&mut to_host, Kind::Signal, &[signal]);
            }
        }
        if asked_to_end.is_some_and(|at| at.elapsed() > SIGNAL_GRACE) {
            frame::encode(&mut to_host, Kind::Signal, &[libc::SIGKILL as u8]);
            if asked_to_end.is_some_and(|at| at.elapsed() > 2 * SIGNAL_GRACE) {
                return Ok(End::Exited(128 + libc::SIGKILL as u8));
            }
        }
        if in_ready != 0 {
            let mut chunk = [0; frame::DATA_CHUNK];
            let wanted = chunk.len().min(credit);
            match stdin.as_mut().map(|s| s.read(&mut chunk[..wanted])) {
                Some(Ok(n)) if n > 0 => {
                    frame::encode(&mut to_host, Kind::Stdin, &chunk[..n]);
                    credit -= n;
                    stdin_used = true;
                }
                Some(Err(e))
                    if matches!(
                        e.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                _ => {
                    stdin = None;
                    frame::encode(&mut to_host, Kind::StdinEnd, &[]);
                }
            }
        }
        if host_ready & WRITABLE != 0 {
            match host.write(&to_host) {
                Ok(n) => drop(to_host.drain(..n)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Ok(End::HostLost { stdin_used }),
            }
        }
        if host_ready & !WRITABLE != 0 {
            let mut chunk = [0; frame::DATA_CHUNK];
            match host.read(&mut chunk) {
                Ok(0) => return Ok(End::HostLost { stdin_used }),
                Ok(n) => from_host.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Ok(End::HostLost { stdin_used }),
            }
            while let Some(frame) = frame::decode(&mut from_host)? {
                match frame.kind {
                    Kind::Stdout => stdout.add(&frame.payload),
                    Kind::Stderr => stderr.add(&frame.payload),
                    Kind::Credit => credit += credited(&frame.payload),
                    Kind::Exit => {
                        let outcome: Outcome =
                            serde_json::from_slice(&frame.payload).map_err(io::Error::other)?;
                        if let Some(message) = outcome.message {
                            stderr.add(format!("on-kvm: {message}\n").as_bytes());
                        }
                        end = Some(End::Exited(outcome.code));
                        to_host.clear();
                    }
                    _ => return Err(io::Error::other("the host sent a client's frame")),
                }
            }
        }
        if out_ready != 0 && !stdout.flush_some() {
            frame::encode(&mut to_host, Kind::CloseOutput, &[1]);
        }
        if err_ready != 0 && !stderr.flush_some() {
            frame::encode(&mut to_host, Kind::CloseOutput, &[2]);
        }
        if end.is_some() && asked_to_end.is_some_and(|at| at.elapsed() > SIGNAL_GRACE) {
            break;
        }
    }
    Ok(end.unwrap_or(End::HostLost { stdin_used }))
}

/// A standard stream without the standard library's buffer.
fn raw(number: i32) -> io::Result<std::fs::File> {
    let owned = match number {
        0 => io::stdin().as_fd().try_clone_to_owned(),
        1 => io::stdout().as_fd().try_clone_to_owned(),
        _ => io::stderr().as_fd().try_clone_to_owned(),
    }?;
    Ok(owned.into())
}

/// Signals that arrived since the last look.
pub fn pending(signals: &PipeReader) -> Vec<u8> {
    let mut bytes = [0; 16];
    let mut signals = signals;
    match signals.read(&mut bytes) {
        Ok(n) => bytes[..n].to_vec(),
        Err(_) => Vec::new(),
    }
}

fn credited(payload: &[u8]) -> usize {
    payload.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes) as usize)
}
