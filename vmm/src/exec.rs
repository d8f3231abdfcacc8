//! Running a command in the guest: the request, the running process, the collected output.
//! A process ends with exactly one exit status or with an error that says why there is none.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::limits::{DEFAULT_GRACE, DRAIN_TIME, MAX_ARGS, MAX_TAIL, MAX_TIMEOUT};
use pvmm_guest_agent::message::{
    Answer, ByteBuf, Command, Exec, ExecReport, Outcome, OutputLimit, Request, Scope, Signal,
};
use pvmm_guest_agent::output::Tail;

pub use pvmm_guest_agent::message::{ExecStatus, OutputCount, Stage, Usage};

use crate::agent::{Agent, AgentError, Event, Exchange, StreamRef};

/// What the guest and the way to it may take beyond the time limit and the grace.
const MARGIN: Duration = Duration::from_secs(5);

/// An exec that gave no exit status.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    #[error("{field}: {why}")]
    InvalidRequest { field: &'static str, why: &'static str },
    #[error("the guest did not end the command {0:?} after its time limit")]
    Overdue(Duration),
    #[error(transparent)]
    Agent(#[from] AgentError),
}

/// A command to run.
#[derive(Debug, Clone)]
pub struct ExecRequest {
    wire: Exec,
    timeout: Option<Duration>,
    grace: Duration,
    input: Vec<u8>,
    cap: OutputCap,
}

/// Of each output, how many bytes `exec` keeps: the first ones, and the last ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputCap {
    pub head: usize,
    pub tail: usize,
}

impl Default for OutputCap {
    fn default() -> Self {
        Self { head: 8 << 20, tail: 64 << 10 }
    }
}

impl ExecRequest {
    /// A program, found along the guest's PATH unless it has a slash, and its arguments.
    pub fn argv<S: AsRef<OsStr>>(argv: impl IntoIterator<Item = S>) -> Self {
        let argv = argv.into_iter().map(|word| bytes(word.as_ref())).collect();
        Self::new(Command::Argv(argv))
    }

    /// A line for the guest's `/bin/sh`.
    pub fn shell(line: impl AsRef<OsStr>) -> Self {
        Self::new(Command::Shell(bytes(line.as_ref())))
    }

    fn new(command: Command) -> Self {
        let wire = Exec {
            command,
            env: Vec::new(),
            clear_env: false,
            cwd: None,
            user: None,
            stdin: false,
            timeout_ms: None,
            grace_ms: None,
            output_limit: None,
        };
        let cap = OutputCap::default();
        Self { wire, timeout: None, grace: DEFAULT_GRACE, input: Vec::new(), cap }
    }

    /// Adds to the environment.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.wire.env.push((bytes(name.as_ref()), bytes(value.as_ref())));
        self
    }

    /// Leaves the guest's default environment out.
    pub fn clear_env(mut self) -> Self {
        self.wire.clear_env = true;
        self
    }

    /// Where to run it; `/` unless set.
    pub fn cwd(mut self, directory: impl AsRef<Path>) -> Self {
        self.wire.cwd = Some(bytes(directory.as_ref().as_os_str()));
        self
    }

    /// Whom to run it as: `name`, `uid`, `name:group` or `uid:gid`; root unless set.
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.wire.user = Some(user.into());
        self
    }

    /// For `start`: gives the process a standard input that the caller writes.
    pub fn piped_stdin(mut self) -> Self {
        self.wire.stdin = true;
        self
    }

    /// For `exec`: what the process reads from its standard input.
    pub fn input(mut self, input: impl Into<Vec<u8>>) -> Self {
        self.wire.stdin = true;
        self.input = input.into();
        self
    }

    /// Ends the process and all it started after this long: TERM, then KILL after the grace.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout.min(MAX_TIMEOUT));
        self
    }

    /// Time between TERM and KILL.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace.min(MAX_TIMEOUT);
        self
    }

    /// For `exec`: how much of each output to keep.
    pub fn output_cap(mut self, cap: OutputCap) -> Self {
        self.cap = cap;
        self
    }

    /// Refuses on this side what no guest could run.
    fn check(&self) -> Result<(), ExecError> {
        let refuse = |field, why| Err(ExecError::InvalidRequest { field, why });
        let words: Vec<&ByteBuf> = match &self.wire.command {
            Command::Argv(argv) if argv.first().is_none_or(|program| program.is_empty()) => {
                return refuse("argv", "is empty: name a program");
            }
            Command::Argv(argv) => argv.iter().collect(),
            Command::Shell(line) => vec![line],
        };
        let pairs = &self.wire.env;
        let all = || words.iter().copied().chain(pairs.iter().flat_map(|(k, v)| [k, v]));
        if words.iter().any(|word| word.contains(&0)) {
            return refuse("argv", "contains a NUL byte: remove it");
        }
        if all().any(|word| word.contains(&0)) {
            return refuse("env", "contains a NUL byte: remove it");
        }
        if pairs.iter().any(|(name, _)| name.is_empty() || name.contains(&b'=')) {
            return refuse("env", "has a name that is empty or contains '='");
        }
        if all().map(|word| word.len() + 1).sum::<usize>() > MAX_ARGS {
            return refuse("argv", "is longer than 768 KiB together with env: use stdin or a file");
        }
        if self.wire.cwd.as_ref().is_some_and(|cwd| cwd.is_empty() || cwd.contains(&0)) {
            return refuse("cwd", "is empty or contains a NUL byte");
        }
        if self.wire.user.as_ref().is_some_and(|user| user.is_empty() || user.contains('\0')) {
            return refuse("user", "is empty or contains a NUL byte");
        }
        Ok(())
    }

    fn message(&self) -> Request {
        let mut wire = self.wire.clone();
        wire.timeout_ms = self.timeout.map(|timeout| timeout.as_millis() as u64);
        wire.grace_ms = Some(self.grace.as_millis() as u64);
        Request::Exec(wire)
    }

    /// When this side stops waiting for a guest that should long have ended the process.
    fn deadline(&self) -> Option<(Instant, Duration)> {
        let late = self.grace + DRAIN_TIME + MARGIN;
        self.timeout.map(|timeout| (Instant::now() + timeout + late, late))
    }
}

fn bytes(text: &OsStr) -> ByteBuf {
    ByteBuf::from(text.as_bytes())
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExitStatus {
    pub status: ExecStatus,
    /// The time limit ended it.
    pub timed_out: bool,
    /// A background process still held an output when the streams were closed.
    pub background: bool,
    pub stdout: OutputCount,
    pub stderr: OutputCount,
    pub duration: Duration,
    pub usage: Usage,
}

impl ExitStatus {
    /// Takes the agent's word only as far as it makes sense.
    fn from_report(report: ExecReport) -> Self {
        let status = match report.status {
            ExecStatus::Exited { code } if !(0..=255).contains(&code) => {
                ExecStatus::Exited { code: 255 }
            }
            ExecStatus::Signaled { signal, core_dumped } => {
                ExecStatus::Signaled { signal: signal.clamp(1, 64), core_dumped }
            }
            other => other,
        };
        Self {
            status,
            timed_out: report.timed_out,
            background: report.background,
            stdout: report.stdout,
            stderr: report.stderr,
            duration: Duration::from_micros(report.duration_us),
            usage: report.usage,
        }
    }

    /// Whether the process ran and exited with 0.
    pub fn success(&self) -> bool {
        self.status == ExecStatus::Exited { code: 0 } && !self.timed_out
    }

    /// The code a shell would give: the exit code, 124 after a time limit, 126 and 127 for what
    /// could not start, 128 + n after a signal.
    pub fn shell_code(&self) -> u8 {
        match self.status {
            ExecStatus::CouldNotStart { stage: Stage::Exec, errno }
                if errno == libc::ENOENT || errno == libc::ENOTDIR =>
            {
                127
            }
            ExecStatus::CouldNotStart { .. } => 126,
            _ if self.timed_out => 124,
            ExecStatus::Exited { code } => code as u8,
            ExecStatus::Signaled { signal, .. } => 128 + signal as u8,
        }
    }
}

/// Something a running process did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    Exited(ExitStatus),
}

/// A process in the guest. Dropping it before its end kills it and all it started.
pub struct Process {
    stream: StreamRef,
    has_stdin: bool,
    deadline: Option<(Instant, Duration)>,
    exited: Option<ExitStatus>,
}

impl Process {
    /// The process in the guest, once the agent has told.
    pub fn pid(&self) -> Option<u32> {
        self.stream.started_now().and_then(|started| started.pid)
    }

    /// The standard input, once, if the request asked for one.
    pub fn take_stdin(&mut self) -> Option<Stdin> {
        std::mem::take(&mut self.has_stdin).then(|| Stdin { stream: self.stream.clone() })
    }

    /// What happens next; `None` when the caller's deadline passes first. After `Exited` it is
    /// `Exited` again.
    pub fn next_event(
        &mut self,
        deadline: Option<Instant>,
    ) -> Result<Option<ProcessEvent>, ExecError> {
        if let Some(status) = self.exited {
            return Ok(Some(ProcessEvent::Exited(status)));
        }
        match self.stream.next(self.until(deadline))? {
            Some(event) => self.take(event).map(Some),
            None => self.late().map(|()| None),
        }
    }

    /// Feeds input while there is some, until something happens.
    fn next_while_feeding(&mut self, input: &mut &[u8]) -> Result<ProcessEvent, ExecError> {
        loop {
            match self.stream.exchange(input, self.until(None))? {
                Some(Exchange::Event(event)) => return self.take(event),
                Some(Exchange::Sent(count)) if count < input.len() => *input = &input[count..],
                Some(Exchange::Sent(_) | Exchange::InputRefused) => {
                    *input = &[];
                    self.stream.end_input()?;
                }
                None => self.late()?,
            }
        }
    }

    fn until(&self, deadline: Option<Instant>) -> Option<Instant> {
        let limit = self.deadline.map(|(at, _)| at);
        [deadline, limit].into_iter().flatten().min()
    }

    fn late(&self) -> Result<(), ExecError> {
        match self.deadline {
            Some((at, late)) if at <= Instant::now() => Err(ExecError::Overdue(late)),
            _ => Ok(()),
        }
    }

    fn take(&mut self, event: Event) -> Result<ProcessEvent, ExecError> {
        Ok(match event {
            Event::Data(Channel::Error, bytes) => ProcessEvent::Stderr(bytes),
            Event::Data(_, bytes) => ProcessEvent::Stdout(bytes),
            Event::Done(Outcome::Ok(Answer::Exec(report))) => {
                let status = ExitStatus::from_report(report);
                self.exited = Some(status);
                ProcessEvent::Exited(status)
            }
            Event::Done(Outcome::Ok(_)) => return Err(AgentError::WrongAnswer.into()),
            Event::Done(Outcome::Failed(failure)) => {
                return Err(AgentError::from(failure).into());
            }
        })
    }

    /// Sends a signal to the process group.
    pub fn signal(&self, signal: i32) -> Result<(), ExecError> {
        self.signaller().send(signal)
    }

    /// A way to signal from another thread.
    pub fn signaller(&self) -> Signaller {
        Signaller { stream: self.stream.clone() }
    }

    /// Kills the process and everything it started.
    pub fn kill(&self) -> Result<(), ExecError> {
        let signal = Signal { signal: libc::SIGKILL, scope: Scope::Tree };
        Ok(self.stream.signal(&signal)?)
    }

    /// Waits for the end, dropping output.
    pub fn wait(mut self) -> Result<ExitStatus, ExecError> {
        loop {
            if let Some(ProcessEvent::Exited(status)) = self.next_event(None)? {
                return Ok(status);
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stream.cancel();
    }
}

/// Signals a process of another thread's.
#[derive(Clone)]
pub struct Signaller {
    stream: StreamRef,
}

impl Signaller {
    /// Sends a signal to the process group.
    pub fn send(&self, signal: i32) -> Result<(), ExecError> {
        if !(1..=64).contains(&signal) {
            return Err(ExecError::InvalidRequest { field: "signal", why: "is not in 1 to 64" });
        }
        Ok(self.stream.signal(&Signal { signal, scope: Scope::Group })?)
    }
}

/// The standard input of a process. Dropping or closing it ends the input.
pub struct Stdin {
    stream: StreamRef,
}

impl Stdin {
    /// Tells the process that no more comes, and learns whether that could be said.
    pub fn close(self) -> Result<(), ExecError> {
        Ok(self.stream.end_input()?)
    }
}

impl Write for Stdin {
    /// Waits while the process does not read; fails with `BrokenPipe` once it never will.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        match self.stream.send_input(bytes, None) {
            Ok(Some(0)) | Ok(None) => Err(io::ErrorKind::BrokenPipe.into()),
            Ok(Some(count)) => Ok(count),
            Err(e) => Err(io::Error::new(io::ErrorKind::ConnectionReset, e)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Stdin {
    fn drop(&mut self) {
        let _ = self.stream.end_input();
    }
}

/// What `exec` kept of one output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    /// The head, and right after it the tail.
    pub bytes: Vec<u8>,
    /// Bytes the process wrote.
    pub total: u64,
    /// Bytes missing between head and tail.
    pub dropped: u64,
}

impl Captured {
    pub fn truncated(&self) -> bool {
        self.dropped > 0
    }
}

/// The result of `exec`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    pub status: ExitStatus,
    pub stdout: Captured,
    pub stderr: Captured,
}

/// Keeps the head and the tail of an output.
struct Capture {
    head: Vec<u8>,
    cap: usize,
    tail: Tail,
    received: u64,
}

impl Capture {
    fn new(cap: OutputCap) -> Self {
        Self { head: Vec::new(), cap: cap.head, tail: Tail::new(cap.tail), received: 0 }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.received += bytes.len() as u64;
        let (head, rest) = bytes.split_at(bytes.len().min(self.cap - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.push(rest);
    }

    fn finish(self, count: OutputCount) -> Captured {
        let dropped = count.dropped + self.tail.forgotten();
        let mut bytes = self.head;
        bytes.extend_from_slice(&self.tail.into_bytes());
        // What came and what the agent says it left out; its own total is only its word.
        Captured { bytes, total: self.received.saturating_add(count.dropped), dropped }
    }
}

impl Agent {
    /// Starts a command; output and end come as events.
    pub fn start(&self, request: &ExecRequest) -> Result<Process, ExecError> {
        request.check()?;
        self.start_message(request, &request.message())
    }

    fn start_message(&self, request: &ExecRequest, wire: &Request) -> Result<Process, ExecError> {
        let deadline = request.deadline();
        let stream = self.open(wire)?;
        Ok(Process { stream, has_stdin: request.wire.stdin, deadline, exited: None })
    }

    /// Runs a command to its end and collects its output, up to the request's cap.
    pub fn exec(&self, request: &ExecRequest) -> Result<Output, ExecError> {
        request.check()?;
        let mut wire = request.message();
        if let Request::Exec(exec) = &mut wire {
            // What would be dropped here anyway need not travel.
            let tail = request.cap.tail.min(MAX_TAIL as usize) as u32;
            let head = request.cap.head as u64 + (request.cap.tail - tail as usize) as u64;
            exec.output_limit = Some(OutputLimit { head, tail });
        }
        let mut process = self.start_message(request, &wire)?;
        let mut input = &request.input[..];
        if request.wire.stdin && input.is_empty() {
            process.stream.end_input()?;
        }
        let (mut stdout, mut stderr) = (Capture::new(request.cap), Capture::new(request.cap));
        let status = loop {
            match process.next_while_feeding(&mut input)? {
                ProcessEvent::Stdout(bytes) => stdout.push(&bytes),
                ProcessEvent::Stderr(bytes) => stderr.push(&bytes),
                ProcessEvent::Exited(status) => break status,
            }
        };
        Ok(Output {
            stdout: stdout.finish(status.stdout),
            stderr: stderr.finish(status.stderr),
            status,
        })
    }
}
