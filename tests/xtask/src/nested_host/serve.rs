//! The inside of the nested host: runs the commands that arrive on its virtio-serial ports.
//!
//! The init of the nested host starts this program as its first process, so that both ends of the
//! frames are built together. Each port serves one command at a time and never closes; a frame
//! announces that a client is gone.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::symlink;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant, UNIX_EPOCH};

use super::frame::{self, DATA_CHUNK, Frame, Kind, Outcome, Request, STDIN_WINDOW};
use super::{HEARTBEAT_EVERY, HEARTBEAT_PORT, SESSION_PORTS};
use crate::sys::{self, READABLE, WRITABLE, Waiting};

/// How much output may wait for the client before the command's output is no longer read.
const OUTPUT_LIMIT: usize = 256 << 10;

/// How long output is still read after the command has ended, from children that have kept its
/// pipes.
const TRICKLE: Duration = Duration::from_millis(200);

/// How long a command may take to end after its client is gone.
const GRACE: Duration = Duration::from_secs(2);

const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";
/// Makes the kernel drop names and attributes, but not the content of files.
const FORGET_NAMES: &str = "2";
/// Makes the kernel not log the drop.
const SILENTLY: &str = "4";

/// How long a port may take to appear.
const PORT_DEADLINE: Duration = Duration::from_secs(20);

const OPEN_FILES: u64 = 1 << 20;

/// Names that programs expect and that the kernel does not make.
const DESCRIPTORS: [(&str, &str); 4] = [
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
];

/// Runs the first process of the host: starts the worker, collects orphans, and powers off when the
/// worker ends.
pub fn first_process() -> ExitCode {
    match Command::new("/run/nested-serve").arg("nested-serve-worker").spawn() {
        Ok(worker) => while sys::reap_one().is_ok_and(|pid| pid != worker.id()) {},
        Err(e) => eprintln!("nested host: cannot start the server: {e}"),
    }
    eprintln!("nested host: cannot switch off: {}", sys::power_off());
    ExitCode::FAILURE
}

/// Serves every port until the host is powered off.
pub fn worker() -> io::Result<()> {
    sys::raise_open_files(OPEN_FILES)?;
    fs::write(DROP_CACHES, SILENTLY)?;
    for (name, place) in DESCRIPTORS {
        // The name may exist already.
        let _ = symlink(place, name);
    }
    for port in SESSION_PORTS {
        let device = open_port(port)?;
        thread::Builder::new().name(format!("port-{port}")).spawn(move || {
            let mut port = Port::new(device);
            loop {
                if let Err(e) = port.serve_one(catch_up) {
                    eprintln!("nested host: {e}");
                    thread::sleep(HEARTBEAT_EVERY);
                }
            }
        })?;
    }
    let mut heartbeat = open_port(HEARTBEAT_PORT)?;
    loop {
        // If the channel is full, nobody reads the heartbeats, and the next one tries again.
        let _ = heartbeat.write(&[0]);
        let next = Instant::now() + HEARTBEAT_EVERY;
        while let Some(left) = next.checked_duration_since(Instant::now()) {
            // Incoming bytes are only meant to interrupt. They are read at once, because a port
            // with unread bytes does not interrupt again.
            sys::poll([Waiting { fd: Some(heartbeat.as_fd()), events: READABLE }], Some(left))?;
            while heartbeat.read(&mut [0; 64]).is_ok_and(|n| n > 0) {}
        }
    }
}

/// Opens a port. The port appears shortly after its driver is loaded. Fails after
/// [`PORT_DEADLINE`].
fn open_port(port: u32) -> io::Result<File> {
    let until = Instant::now() + PORT_DEADLINE;
    loop {
        if let Some(path) = find_port(port) {
            let device = OpenOptions::new().read(true).write(true).open(path)?;
            sys::set_nonblocking(&device)?;
            return Ok(device);
        }
        if Instant::now() >= until {
            return Err(io::Error::other(format!("port {port} did not appear")));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the device of a port. Its name is `vport`, the index of the controller, `p`, and the
/// number of the port.
fn find_port(port: u32) -> Option<PathBuf> {
    let number = format!("p{port}");
    fs::read_dir("/dev").ok()?.flatten().map(|entry| entry.path()).find(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.strip_prefix("vport")
            .and_then(|rest| rest.strip_suffix(&number))
            .is_some_and(|index| index.parse::<u32>().is_ok())
    })
}

/// Makes the changes of the outer machine since the last command visible: its files and its time.
fn catch_up(request: &Request) {
    /// A larger difference cannot be the time that the request took.
    const TOLERATED: Duration = Duration::from_secs(2);
    let ours = UNIX_EPOCH.elapsed().unwrap_or_default();
    if request.time_since_epoch.abs_diff(ours) > TOLERATED
        && let Err(e) = sys::set_clock(request.time_since_epoch)
    {
        eprintln!("nested host: cannot set the clock: {e}");
    }
    if let Err(e) = fs::write(DROP_CACHES, FORGET_NAMES) {
        eprintln!("nested host: old names may be seen: {e}");
    }
}

/// One virtio-serial port, with bytes that were received or wait to be sent.
struct Port {
    device: File,
    received: Vec<u8>,
    outgoing: Vec<u8>,
}

impl Port {
    fn new(device: File) -> Self {
        Port { device, received: Vec::new(), outgoing: Vec::new() }
    }

    fn send(&mut self, kind: Kind, payload: &[u8]) {
        frame::encode(&mut self.outgoing, kind, payload);
    }

    /// Reads and writes as much as possible without waiting. `events` is the result of a poll of
    /// the device.
    fn transfer(&mut self, events: i16) -> io::Result<()> {
        if events & !WRITABLE != 0 {
            let mut chunk = [0; DATA_CHUNK];
            match self.device.read(&mut chunk) {
                Ok(0) => return Err(io::Error::other("the port lost its other end")),
                Ok(n) => self.received.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        if events & WRITABLE != 0 && !self.outgoing.is_empty() {
            let sent = match self.device.write(&self.outgoing) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
                result => result?,
            };
            self.outgoing.drain(..sent);
        }
        Ok(())
    }

    fn interest(&self) -> i16 {
        if self.outgoing.is_empty() { READABLE } else { READABLE | WRITABLE }
    }

    /// Waits for a command, calls `prepare`, runs the command to its end and reports the outcome.
    fn serve_one(&mut self, prepare: impl FnOnce(&Request)) -> io::Result<()> {
        let request = loop {
            // Other frames between two commands belong to the command that has ended.
            match frame::decode(&mut self.received)? {
                Some(Frame { kind: Kind::Open, payload }) => break payload,
                Some(_) => continue,
                None => {}
            }
            let port = Waiting { fd: Some(self.device.as_fd()), events: self.interest() };
            let [events] = sys::poll([port], None)?;
            self.transfer(events)?;
        };
        let outcome = match serde_json::from_slice(&request)
            .map_err(|e| Outcome { code: 125, message: Some(format!("bad request: {e}")) })
            .inspect(prepare)
            .and_then(start)
        {
            Ok(running) => self.run(running)?,
            Err(outcome) => outcome,
        };
        let payload = serde_json::to_vec(&outcome).map_err(io::Error::other)?;
        self.send(Kind::Exit, &payload);
        Ok(())
    }

    fn run(&mut self, mut running: Running) -> io::Result<Outcome> {
        let mut ended_at = None;
        loop {
            while let Some(frame) = frame::decode(&mut self.received)? {
                running.obey(frame);
            }
            running.end_if_overdue();
            if ended_at.is_some() && running.is_silent() {
                break;
            }

            let room = self.outgoing.len() < OUTPUT_LIMIT;
            let has_ended = ended_at.is_some();
            let [port, stdin, stdout, stderr, ended] = sys::poll(
                [
                    Waiting { fd: Some(self.device.as_fd()), events: self.interest() },
                    Waiting { fd: running.stdin_to_fill(), events: WRITABLE },
                    Waiting { fd: fd_if(room, &running.stdout), events: READABLE },
                    Waiting { fd: fd_if(room, &running.stderr), events: READABLE },
                    Waiting { fd: (!has_ended).then(|| running.ended.as_fd()), events: READABLE },
                ],
                Some(if has_ended { TRICKLE } else { HEARTBEAT_EVERY }),
            )?;
            self.transfer(port)?;
            if stdin != 0 {
                let taken = running.feed();
                self.send(Kind::Credit, &(taken as u32).to_le_bytes());
            }
            if stdout != 0 {
                drain(&mut running.stdout, |bytes| self.send(Kind::Stdout, bytes));
            }
            if stderr != 0 {
                drain(&mut running.stderr, |bytes| self.send(Kind::Stderr, bytes));
            }
            if ended != 0 {
                ended_at = Some(Instant::now());
            }
            if has_ended && room && stdout == 0 && stderr == 0 {
                break;
            }
        }
        let status = running.child.wait()?;
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
        Ok(Outcome { code: code as u8, message: None })
    }
}

fn fd_if(wanted: bool, stream: &Option<impl AsFd>) -> Option<std::os::fd::BorrowedFd<'_>> {
    stream.as_ref().filter(|_| wanted).map(|s| s.as_fd())
}

/// Reads once from a pipe, and closes it at its end.
fn drain(pipe: &mut Option<impl Read>, send: impl FnOnce(&[u8])) {
    let mut chunk = [0; DATA_CHUNK];
    match pipe.as_mut().map(|p| p.read(&mut chunk)) {
        Some(Ok(0)) => *pipe = None,
        Some(Ok(n)) => send(&chunk[..n]),
        Some(Err(e)) if e.kind() == io::ErrorKind::WouldBlock => {}
        Some(Err(_)) => *pipe = None,
        None => {}
    }
}

/// A running command with its pipes. A pipe that is `None` is closed.
struct Running {
    child: Child,
    ended: OwnedFd,
    stdin: Option<File>,
    stdout: Option<File>,
    stderr: Option<File>,
    /// The user's end of the command's terminal, if it has one.
    terminal: Option<File>,
    to_stdin: Vec<u8>,
    stdin_ends: bool,
    kill_at: Option<Instant>,
}

fn start(request: Request) -> Result<Running, Outcome> {
    let failed = |code, what: String| Outcome { code, message: Some(what) };
    let cwd = OsString::from_vec(request.cwd);
    let mut argv = request.argv.into_iter().map(OsString::from_vec);
    let Some(program) = argv.next() else {
        return Err(failed(125, "no command given".into()));
    };
    if !fs::metadata(&cwd).is_ok_and(|m| m.is_dir()) {
        return Err(failed(125, format!("{} is not in the nested host", cwd.display())));
    }
    let mut command = Command::new(&program);
    command.args(argv).current_dir(cwd).env_clear();
    for (name, value) in request.env {
        let (name, value) = (OsString::from_vec(name), OsString::from_vec(value));
        if name == "XDG_RUNTIME_DIR" {
            // The nested host has its own /run, so the folder of the outer machine is missing.
            let _ = fs::create_dir_all(&value);
        }
        command.env(name, value);
    }
    let ours = connect(&mut command, request.terminal)
        .map_err(|e| failed(125, format!("cannot make the command's streams: {e}")))?;
    sys::with_default_signals(&mut command);
    let child = command.spawn().map_err(|e| {
        let code = if e.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
        failed(code, format!("{}: {e}", program.display()))
    })?;
    let ended = sys::pidfd(child.id()).map_err(|e| failed(125, format!("pidfd: {e}")))?;
    let [stdin, stdout, stderr, terminal] = ours;
    Ok(Running {
        child,
        ended,
        stdin,
        stdout,
        stderr,
        terminal,
        to_stdin: Vec::new(),
        stdin_ends: false,
        kill_at: None,
    })
}

/// Connects the command to its streams and puts it into a process group. Returns this process's
/// ends: stdin, stdout, stderr, terminal.
fn connect(command: &mut Command, terminal: Option<sys::Size>) -> io::Result<[Option<File>; 4]> {
    if let Some(size) = terminal {
        let (person, program) = sys::open_terminal(size)?;
        command.stdin(program.try_clone()?).stdout(program.try_clone()?).stderr(program);
        sys::on_its_terminal(command);
        sys::set_nonblocking(&person)?;
        let person = File::from(person);
        return Ok([Some(person.try_clone()?), Some(person.try_clone()?), None, Some(person)]);
    }
    let ((stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr)) =
        (io::pipe()?, io::pipe()?, io::pipe()?);
    command.stdin(stdin).stdout(stdout).stderr(stderr).process_group(0);
    sys::set_nonblocking(&to_stdin)?;
    let file = |fd: OwnedFd| Some(File::from(fd));
    Ok([file(to_stdin.into()), file(from_stdout.into()), file(from_stderr.into()), None])
}

impl Running {
    fn obey(&mut self, frame: Frame) {
        match (frame.kind, frame.payload.as_slice()) {
            (Kind::Stdin, bytes) if self.to_stdin.len() + bytes.len() <= STDIN_WINDOW => {
                if self.stdin.is_some() {
                    self.to_stdin.extend_from_slice(bytes);
                }
            }
            (Kind::StdinEnd, _) => self.stdin_ends = true,
            (Kind::Signal, [signal]) => self.signal(i32::from(*signal)),
            (Kind::Resize, [a, b, c, d]) => {
                let size = (u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d]));
                if let Some(terminal) = &self.terminal {
                    let _ = sys::set_terminal_size(terminal, size);
                }
            }
            (Kind::CloseOutput, [1]) => self.stdout = None,
            (Kind::CloseOutput, [2]) => self.stderr = None,
            // This also handles a client that sends an unexpected frame.
            _ => {
                (self.stdin, self.stdout, self.stderr) = (None, None, None);
                self.signal(libc::SIGTERM);
                self.kill_at.get_or_insert(Instant::now() + GRACE);
            }
        }
        if self.stdin_ends && self.to_stdin.is_empty() {
            self.stdin = None;
        }
    }

    fn signal(&self, signal: i32) {
        // The group may have ended already.
        let _ = sys::kill_group(self.child.id(), signal);
    }

    fn end_if_overdue(&mut self) {
        if self.kill_at.is_some_and(|at| Instant::now() >= at) {
            self.signal(libc::SIGKILL);
        }
    }

    fn is_silent(&self) -> bool {
        self.stdout.is_none() && self.stderr.is_none()
    }

    fn stdin_to_fill(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        fd_if(!self.to_stdin.is_empty(), &self.stdin)
    }

    /// Writes as much to the command's stdin as its pipe takes, and returns the number of bytes. If
    /// the command has closed its stdin, all bytes count as taken.
    fn feed(&mut self) -> usize {
        let Some(stdin) = self.stdin.as_mut() else { return 0 };
        let taken = match stdin.write(&self.to_stdin) {
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
            Err(_) => {
                self.stdin = None;
                self.to_stdin.len()
            }
        };
        self.to_stdin.drain(..taken);
        if self.stdin_ends && self.to_stdin.is_empty() {
            self.stdin = None;
        }
        taken
    }
}

#[cfg(test)]
mod tests;
