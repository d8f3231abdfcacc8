//! The outside of one command: connects the stdin, stdout, stderr and signals of this process with
//! frames.
//!
//! One loop serves all streams and never blocks on a single one, so that Ctrl-C works while stdout
//! or stdin is blocked.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, UNIX_EPOCH};

use super::frame::{self, Kind, Outcome, Request, STDIN_WINDOW};
use crate::sys::{self, READABLE, WRITABLE, Waiting};

/// How many bytes a writable pipe takes without blocking.
const PIPE_ATOMIC: usize = 4096;

/// How much output may wait for a slow reader before the host's output is no longer read.
const OUTPUT_LIMIT: usize = 256 << 10;

/// How long a command may take to end after the first signal.
const SIGNAL_GRACE: Duration = Duration::from_secs(5);

/// Signals within this time count as one.
const SAME_WISH: Duration = Duration::from_secs(1);

/// The signals that are passed on, and that end the session if the command does not end.
pub const ENDING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// The signal for a new size of the terminal.
pub const RESIZED: i32 = libc::SIGWINCH;

/// How a session ended.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// The exit code of the command, or 128 plus its signal.
    Exited(u8),
    /// The host was lost before the command ended. The command can be run again only if no stdin
    /// was used.
    HostLost { stdin_used: bool },
}

/// Returns the request for a command: its arguments, the current folder, and the variables that
/// have the same meaning in the nested host.
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

/// Returns the size of this process's terminal, if stdin and stdout are terminals.
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

/// An output of this process, with bytes that are not written yet.
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

    /// Writes once. Returns false if this write finds that the output is closed.
    fn flush_some(&mut self) -> bool {
        let Some(to) = self.to.as_mut() else { return true };
        let chunk = &self.waiting[..self.waiting.len().min(PIPE_ATOMIC)];
        match to.write(chunk).and_then(|n| to.flush().map(|()| n)) {
            Ok(n) => {
                self.waiting.drain(..n);
                true
            }
            Err(e) if is_temporary(&e) => true,
            Err(_) => {
                self.to = None;
                self.waiting.clear();
                false
            }
        }
    }
}

/// Runs one command over `host`. Returns how it ended, after all of its output is written.
pub fn run(host: UnixStream, request: &Request, signals: &PipeReader) -> io::Result<End> {
    // The command's own terminal interprets the keys, including Ctrl-C.
    let _raw = request.terminal.map(|_| sys::RawTerminal::new(io::stdin())).transpose()?;
    Session::new(host, [raw(0)?, raw(1)?, raw(2)?])?.run(request, signals)
}

/// One command, and the streams on both sides.
struct Session {
    host: UnixStream,
    from_host: Vec<u8>,
    to_host: Vec<u8>,
    stdin: Option<File>,
    stdout: Output<File>,
    stderr: Output<File>,
    /// How many bytes of stdin the host still accepts.
    credit: usize,
    stdin_used: bool,
    asked_to_end: Option<Instant>,
    end: Option<End>,
}

impl Session {
    fn new(host: UnixStream, [stdin, stdout, stderr]: [File; 3]) -> io::Result<Self> {
        host.set_nonblocking(true)?;
        Ok(Session {
            host,
            from_host: Vec::new(),
            to_host: Vec::new(),
            stdin: Some(stdin),
            stdout: Output::new(stdout),
            stderr: Output::new(stderr),
            credit: STDIN_WINDOW,
            stdin_used: false,
            asked_to_end: None,
            end: None,
        })
    }

    fn run(mut self, request: &Request, signals: &PipeReader) -> io::Result<End> {
        let request = serde_json::to_vec(request).map_err(io::Error::other)?;
        self.send(Kind::Open, &request);
        while self.end.is_none() || self.has_output() {
            let [host, stdin, stdout, stderr, signalled] = self.wait(signals)?;
            if signalled != 0 {
                self.pass_signals(signals);
            }
            if stdin != 0 {
                self.take_stdin();
            }
            if host & WRITABLE != 0 {
                self.write_host();
            }
            if host & !WRITABLE != 0 {
                self.read_host()?;
            }
            if stdout != 0 && !self.stdout.flush_some() {
                self.send(Kind::CloseOutput, &[1]);
            }
            if stderr != 0 && !self.stderr.flush_some() {
                self.send(Kind::CloseOutput, &[2]);
            }
            if self.is_overdue() {
                break;
            }
        }
        Ok(self.end.unwrap_or(End::Exited(128 + libc::SIGKILL as u8)))
    }

    fn send(&mut self, kind: Kind, payload: &[u8]) {
        frame::encode(&mut self.to_host, kind, payload);
    }

    fn has_output(&self) -> bool {
        !self.stdout.waiting.is_empty() || !self.stderr.waiting.is_empty()
    }

    /// Waits until a stream is ready. The events are those of host, stdin, stdout, stderr and
    /// signals, in this order.
    fn wait(&self, signals: &PipeReader) -> io::Result<[i16; 5]> {
        let runs = self.end.is_none();
        let has_room = self.stdout.waiting.len() + self.stderr.waiting.len() < OUTPUT_LIMIT;
        let read = if runs && has_room { READABLE } else { 0 };
        let write = if runs && !self.to_host.is_empty() { WRITABLE } else { 0 };
        let wants_stdin = runs && self.credit > 0 && self.to_host.len() < STDIN_WINDOW;
        let stdin = self.stdin.as_ref().filter(|_| wants_stdin);
        sys::poll(
            [
                Waiting {
                    fd: (read | write != 0).then(|| self.host.as_fd()),
                    events: read | write,
                },
                Waiting { fd: stdin.map(|stdin| stdin.as_fd()), events: READABLE },
                Waiting { fd: self.stdout.fd(), events: WRITABLE },
                Waiting { fd: self.stderr.fd(), events: WRITABLE },
                Waiting { fd: Some(signals.as_fd()), events: READABLE },
            ],
            Some(Duration::from_secs(1)),
        )
    }

    fn pass_signals(&mut self, signals: &PipeReader) {
        for signal in pending(signals) {
            if i32::from(signal) == RESIZED {
                if let Some((rows, columns)) = terminal() {
                    self.send(Kind::Resize, &[rows.to_le_bytes(), columns.to_le_bytes()].concat());
                }
                continue;
            }
            // A second signal after some time kills the command. Two signals at once count as one:
            // a terminal and a parent may both pass on a signal.
            let again = self.asked_to_end.is_some_and(|at| at.elapsed() > SAME_WISH);
            self.asked_to_end.get_or_insert_with(Instant::now);
            self.send(Kind::Signal, &[if again { libc::SIGKILL as u8 } else { signal }]);
        }
    }

    /// Kills a command that has not ended after [`SIGNAL_GRACE`]. Returns true after twice that
    /// time, when the command is abandoned.
    fn is_overdue(&mut self) -> bool {
        let Some(asked) = self.asked_to_end.map(|at| at.elapsed()) else { return false };
        if asked > SIGNAL_GRACE && self.end.is_none() {
            self.send(Kind::Signal, &[libc::SIGKILL as u8]);
        }
        asked > 2 * SIGNAL_GRACE
    }

    fn take_stdin(&mut self) {
        let mut chunk = [0; frame::DATA_CHUNK];
        let wanted = chunk.len().min(self.credit);
        let Some(stdin) = self.stdin.as_mut() else { return };
        match stdin.read(&mut chunk[..wanted]) {
            Ok(n) if n > 0 => {
                self.send(Kind::Stdin, &chunk[..n]);
                self.credit -= n;
                self.stdin_used = true;
            }
            Err(e) if is_temporary(&e) => {}
            // This is the end of stdin, or stdin is not open.
            _ => {
                self.stdin = None;
                self.send(Kind::StdinEnd, &[]);
            }
        }
    }

    fn write_host(&mut self) {
        match self.host.write(&self.to_host) {
            Ok(n) => drop(self.to_host.drain(..n)),
            Err(e) if is_temporary(&e) => {}
            Err(_) => self.lose_host(),
        }
    }

    fn read_host(&mut self) -> io::Result<()> {
        let mut chunk = [0; frame::DATA_CHUNK];
        match self.host.read(&mut chunk) {
            Ok(n) if n > 0 => self.from_host.extend_from_slice(&chunk[..n]),
            Err(e) if is_temporary(&e) => {}
            _ => self.lose_host(),
        }
        while let Some(frame) = frame::decode(&mut self.from_host)? {
            match frame.kind {
                Kind::Stdout => self.stdout.add(&frame.payload),
                Kind::Stderr => self.stderr.add(&frame.payload),
                Kind::Credit => self.credit += credited(&frame.payload),
                Kind::Exit => {
                    let outcome: Outcome =
                        serde_json::from_slice(&frame.payload).map_err(io::Error::other)?;
                    if let Some(message) = outcome.message {
                        self.stderr.add(format!("on-kvm: {message}\n").as_bytes());
                    }
                    self.end = Some(End::Exited(outcome.code));
                }
                _ => return Err(io::Error::other("the host sent a client's frame")),
            }
        }
        Ok(())
    }

    /// Ends the session. If the command was asked to end, it counts as killed.
    fn lose_host(&mut self) {
        let killed = End::Exited(128 + libc::SIGKILL as u8);
        let lost = End::HostLost { stdin_used: self.stdin_used };
        self.end.get_or_insert(if self.asked_to_end.is_some() { killed } else { lost });
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Returns a standard stream without the buffer of the standard library.
fn raw(number: i32) -> io::Result<File> {
    let owned = match number {
        0 => io::stdin().as_fd().try_clone_to_owned(),
        1 => io::stdout().as_fd().try_clone_to_owned(),
        _ => io::stderr().as_fd().try_clone_to_owned(),
    }?;
    Ok(owned.into())
}

/// Returns the signals that have arrived since the last call.
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

#[cfg(test)]
mod tests {
    use std::io::Seek;
    use std::thread;

    use super::*;

    /// Runs a session whose host is `host`, with `stdin` as a file. Returns its end, stdout and
    /// stderr.
    fn session(
        stdin: &[u8],
        host: impl FnOnce(UnixStream) + Send + 'static,
    ) -> (End, Vec<u8>, Vec<u8>) {
        signalled_session(stdin, &[], host)
    }

    /// Runs a session after the signals `arrived`.
    fn signalled_session(
        stdin: &[u8],
        arrived: &[u8],
        host: impl FnOnce(UnixStream) + Send + 'static,
    ) -> (End, Vec<u8>, Vec<u8>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let files: [File; 3] = std::array::from_fn(|_| tempfile::tempfile().unwrap());
        let [mut input, mut stdout, mut stderr] = files;
        input.write_all(stdin).unwrap();
        input.rewind().unwrap();
        let outputs = [&stdout, &stderr].map(|file| file.try_clone().unwrap());
        let [out, err] = outputs;
        let player = thread::spawn(move || host(theirs));
        let (signals, mut sender) = io::pipe().unwrap();
        sender.write_all(arrived).unwrap();
        let end = Session::new(ours, [input, out, err])
            .unwrap()
            .run(&request(&["x".into()]).unwrap(), &signals)
            .unwrap();
        player.join().unwrap();
        let read = |file: &mut File| {
            let mut bytes = Vec::new();
            file.rewind().unwrap();
            file.read_to_end(&mut bytes).unwrap();
            bytes
        };
        (end, read(&mut stdout), read(&mut stderr))
    }

    fn say(host: &mut UnixStream, kind: Kind, payload: &[u8]) {
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, kind, payload);
        host.write_all(&bytes).unwrap();
    }

    fn next(host: &mut UnixStream) -> frame::Frame {
        frame::read(host).unwrap().unwrap()
    }

    #[test]
    fn session_with_an_exit_writes_everything_before_it_ends() {
        let (end, stdout, stderr) = session(b"", |mut host| {
            assert_eq!(next(&mut host).kind, Kind::Open);
            say(&mut host, Kind::Stdout, &[b'o'; 100_000]);
            say(&mut host, Kind::Stderr, b"e");
            say(&mut host, Kind::Exit, br#"{"code":7,"message":"why"}"#);
        });
        assert_eq!(end, End::Exited(7));
        assert_eq!(stdout.len(), 100_000);
        assert_eq!(stderr, b"eon-kvm: why\n");
    }

    #[test]
    fn session_whose_host_dies_says_whether_stdin_was_read() {
        let (end, ..) = session(b"data", |mut host| while next(&mut host).kind != Kind::Stdin {});
        assert_eq!(end, End::HostLost { stdin_used: true });
        let (end, ..) = session(b"", |mut host| while next(&mut host).kind != Kind::StdinEnd {});
        assert_eq!(end, End::HostLost { stdin_used: false });
    }

    #[test]
    fn session_that_was_asked_to_end_does_not_miss_its_host() {
        let term = libc::SIGTERM as u8;
        let (end, ..) = signalled_session(b"", &[term], move |mut host| {
            let frame = std::iter::repeat_with(|| next(&mut host)).find(|f| f.kind == Kind::Signal);
            assert_eq!(frame.unwrap().payload, [term]);
        });
        assert_eq!(end, End::Exited(137));
    }

    #[test]
    fn session_without_credit_sends_no_more_stdin() {
        let (end, ..) = session(&vec![0; STDIN_WINDOW + 1], |mut host| {
            let mut received = 0;
            while received < STDIN_WINDOW {
                let frame = next(&mut host);
                received += if frame.kind == Kind::Stdin { frame.payload.len() } else { 0 };
            }
            host.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            assert!(frame::read(&mut host).is_err());
            say(&mut host, Kind::Credit, &1u32.to_le_bytes());
            assert_eq!(next(&mut host).payload.len(), 1);
            say(&mut host, Kind::Exit, br#"{"code":0,"message":null}"#);
        });
        assert_eq!(end, End::Exited(0));
    }

    #[test]
    fn variables_that_mean_nothing_inside_are_not_passed() {
        assert!(is_passed("PATH") && is_passed("CARGO_HOME") && is_passed("PVMM_X"));
        assert!(!is_passed("SSH_AUTH_SOCK") && !is_passed("PWD"));
    }
}
