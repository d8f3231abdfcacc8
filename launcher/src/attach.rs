//! A command in a guest as if it ran here: its output, its input, its signals, its exit code.
//!
//! `run` and `exec` share it, so that a command behaves the same whoever started its VM.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, AgentError};
use pvmm::exec::{
    ExecError, ExecRequest, ExecStatus, ExitStatus, Process, ProcessEvent, Signaller, Stage, Stdin,
};

use crate::cli::CommandFlags;
use crate::exit::{self, Failure, Outcome};
use crate::screen::Screen;
use crate::sys::poll;
use crate::sys::signals::Signals;
use crate::sys::terminal::{self, RawMode};
use crate::vm_dir::VmDir;

/// A second Ctrl-C within this time ends it, whatever the command makes of the first.
const TWICE: Duration = Duration::from_secs(2);
/// How long a command may take to end after TERM, HUP or QUIT.
const SIGNAL_GRACE: Duration = Duration::from_secs(10);
/// Between TERM and KILL of a command that ran out of time.
const TIMEOUT_GRACE: Duration = Duration::from_secs(1);
/// What the way to the guest may take beyond that.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(2);
/// How long the agent of a running VM may take to answer: a hundred clients at once on a small host do take long.
pub const PATIENCE: Duration = Duration::from_secs(60);
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// The request for a command line's command.
pub fn request(argv: &[std::ffi::OsString], flags: &CommandFlags) -> ExecRequest {
    let mut request = ExecRequest::argv(argv).grace(TIMEOUT_GRACE);
    if flags.tty {
        request = request.terminal(terminal::size());
        if let Some(kind) = std::env::var_os("TERM").filter(|kind| !kind.is_empty()) {
            request = request.env("TERM", kind);
        }
    }
    for var in &flags.env {
        request = request.env(&var.name, &var.value);
    }
    if let Some(dir) = &flags.workdir {
        request = request.cwd(dir);
    }
    if let Some(user) = &flags.user {
        request = request.user(user);
    }
    match flags.interactive {
        true => request.piped_stdin(),
        false => request,
    }
}

/// Refuses `-t` where there is no terminal to give.
pub fn require_terminal(flags: &CommandFlags) -> Result<(), Failure> {
    match flags.tty && !io::stdin().is_terminal() {
        true => Err(Failure::usage("-t: standard input is not a terminal")
            .hint("leave -t out; -i alone passes standard input on")),
        false => Ok(()),
    }
}

/// Reaches a VM's agent, and waits for a place if it is busy.
pub fn connect(dir: &VmDir, patience: Duration) -> Result<Agent, AgentError> {
    let busy_until = Instant::now() + PATIENCE;
    loop {
        match Agent::connect(&dir.vsock(), Instant::now() + patience) {
            Err(AgentError::TooMany) if Instant::now() < busy_until => {
                std::thread::sleep(BUSY_PAUSE);
            }
            connected => return connected,
        }
    }
}

/// How a command that was attached to came to its end.
pub enum End {
    Exited(ExitStatus),
    /// Our own standard output takes no more: its reader went away, or its disk is full.
    Output(io::Error),
    /// It ran out of time, and the guest did not end it.
    Overdue,
}

impl End {
    /// The exit code, with a word on standard error where the code alone would be a riddle.
    pub fn outcome(self, names: &Names) -> Outcome {
        match self {
            End::Exited(status) if matches!(status.status, ExecStatus::CouldNotStart { .. }) => {
                Err(could_not_start(&status, names))
            }
            End::Exited(status) => Ok(status.shell_code()),
            End::Output(error) => Err(error.into()),
            End::Overdue => Ok(exit::TIMEOUT),
        }
    }
}

/// Runs the command to its end. `abort` ends everything at once, with the given exit code.
pub fn attach(
    agent: &Agent,
    mut request: ExecRequest,
    timeout: Option<Duration>,
    signals: Signals,
    abort: impl Fn(u8) + Send + Sync + 'static,
) -> Result<End, ExecError> {
    let late = timeout.map(|timeout| Instant::now() + timeout + TIMEOUT_GRACE + TIMEOUT_MARGIN);
    if let Some(timeout) = timeout {
        request = request.timeout(timeout);
    }
    let has_terminal = request.has_terminal();
    if has_terminal {
        // While the VM booted, it may have changed.
        request = request.terminal(terminal::size());
    }
    let process = agent.start(&request)?;
    let manner = Manner { has_terminal, owns: true };
    follow(process, late, manner, signals, abort)
}

/// How a person is attached to a command.
#[derive(Clone, Copy)]
pub struct Manner {
    /// The command has a terminal, which is this one.
    pub has_terminal: bool,
    /// The command is ours and ends with us.
    pub owns: bool,
}

/// Passes output, input and signals between here and a command, to its end.
pub fn follow(
    mut process: Process,
    late: Option<Instant>,
    manner: Manner,
    signals: Signals,
    abort: impl Fn(u8) + Send + Sync + 'static,
) -> Result<End, ExecError> {
    // Only now: until here Ctrl-C is for us.
    let _raw = manner.has_terminal.then(RawMode::enter);
    let signaller = process.signaller();
    let screen = Arc::new(Mutex::new(Screen::default()));
    let abort = {
        let screen = Arc::clone(&screen);
        Arc::new(move |code| {
            calm(&screen);
            abort(code);
        })
    };
    let leave = manner.has_terminal.then(|| Arc::clone(&abort));
    in_background("signals", move || forward_signals(&signals, &signaller, manner, &*abort));
    if let Some(stdin) = process.take_stdin() {
        in_background("stdin", move || {
            if forward_input(stdin, leave.is_some()) == InputEnd::Left
                && let Some(leave) = leave
            {
                leave(exit::by_signal(libc::SIGHUP));
            }
        });
    }
    let (mut stdout, mut stderr) = (Sink::new(&io::stdout()), Sink::new(&io::stderr()));
    loop {
        match process.next_event(late) {
            Ok(Some(ProcessEvent::Stdout(bytes))) => {
                if manner.has_terminal {
                    screen.lock().unwrap_or_else(PoisonError::into_inner).note(&bytes);
                }
                if let Err(error) = stdout.write(&bytes) {
                    return Ok(End::Output(error));
                }
            }
            // Nobody to tell that nobody listens.
            Ok(Some(ProcessEvent::Stderr(bytes))) => drop(stderr.write(&bytes)),
            Ok(Some(ProcessEvent::Exited(status))) => {
                if !matches!(status.status, ExecStatus::Exited { .. }) {
                    calm(&screen);
                }
                return Ok(End::Exited(status));
            }
            Ok(None) | Err(ExecError::Overdue(_)) => {
                calm(&screen);
                return Ok(End::Overdue);
            }
            Err(error) => {
                calm(&screen);
                // What is said of it begins on a line of its own, wherever the command left the cursor.
                if manner.has_terminal {
                    let _ = stderr.write(b"\r\n");
                }
                return Err(error);
            }
        }
    }
}

/// Takes back what a program that was cut off has done to the terminal.
fn calm(screen: &Mutex<Screen>) {
    let bytes = screen.lock().unwrap_or_else(PoisonError::into_inner).calm();
    // A terminal that takes nothing needs no calming.
    let _ = Sink::new(&io::stdout()).write(&bytes);
}

/// A thread that ends with the process. Without it the command still runs, so its lack is no failure.
pub fn in_background(name: &str, work: impl FnOnce() + Send + 'static) {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    if let Err(error) = thread {
        crate::output::remark(false, &format!("warning: no thread for {name}: {error}"));
    }
}

/// Passes every signal on; ends everything when that does not help.
fn forward_signals(signals: &Signals, signaller: &Signaller, manner: Manner, abort: &dyn Fn(u8)) {
    let mut last_interrupt: Option<Instant> = None;
    // When the command must have ended, and the signal that told it to.
    let mut over: Option<(Instant, i32)> = None;
    loop {
        let left = over.map(|(at, _)| at.saturating_duration_since(Instant::now()));
        match (poll::readable(&[signals.as_fd()], left), over) {
            (Ok(ready), _) if ready[0] => {}
            (Ok(_), Some((at, signal))) if at <= Instant::now() => {
                return abort(exit::by_signal(signal));
            }
            (Ok(_), _) => continue,
            (Err(_), _) => return,
        }
        let Ok(signal) = signals.next() else { return };
        if signal == libc::SIGWINCH {
            // One that fails is followed by the loss of the connection, of which others tell.
            let _ = signaller.resize(terminal::size());
            continue;
        }
        if !manner.owns && signal != libc::SIGINT {
            // It was there before us and stays.
            return abort(exit::by_signal(signal));
        }
        let again = last_interrupt.is_some_and(|at| at.elapsed() < TWICE);
        if signal == libc::SIGINT && again || signaller.send(signal).is_err() {
            return abort(exit::by_signal(signal));
        }
        match signal {
            libc::SIGINT => last_interrupt = Some(Instant::now()),
            _ => over = over.or(Some((Instant::now() + SIGNAL_GRACE, signal))),
        }
    }
}

/// Why no more input is copied.
#[derive(Debug, PartialEq, Eq)]
enum InputEnd {
    Over,
    /// The person at the terminal wants to leave a guest that does not answer.
    Left,
}

/// Ctrl-], three times within a second, leaves: a guest that hangs takes no other key.
const LEAVE_KEY: u8 = 0x1d;
const LEAVE_TIMES: usize = 3;
const LEAVE_TIME: Duration = Duration::from_secs(1);

/// Copies standard input until its end, or until the command wants no more.
fn forward_input(mut stdin: Stdin, has_terminal: bool) -> InputEnd {
    let Ok(fd) = io::stdin().as_fd().try_clone_to_owned() else { return InputEnd::Over };
    let mut input = File::from(fd);
    let mut buffer = vec![0; 64 << 10];
    let mut pressed: Vec<Instant> = Vec::new();
    loop {
        match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                if has_terminal && buffer[..count].iter().all(|key| *key == LEAVE_KEY) {
                    let now = Instant::now();
                    pressed.retain(|at| now.duration_since(*at) < LEAVE_TIME);
                    pressed.extend(std::iter::repeat_n(now, count));
                    if pressed.len() >= LEAVE_TIMES {
                        return InputEnd::Left;
                    }
                }
                if stdin.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if poll::readable(&[input.as_fd()], None).is_err() {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    InputEnd::Over
}

/// One of our outputs, unbuffered; a terminal or pipe in non-blocking mode is waited for.
pub struct Sink {
    file: Option<File>,
}

impl Sink {
    pub fn new(stream: &impl AsFd) -> Self {
        Self { file: stream.as_fd().try_clone_to_owned().ok().map(File::from) }
    }

    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        while !bytes.is_empty() {
            match file.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    poll::writable(file.as_fd())?;
                }
                Err(error) => {
                    self.file = None;
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

/// Who was killed for lack of memory, as far as the guest says.
pub fn oom_remark(agent: &Agent) -> String {
    let last = agent.metrics().ok().and_then(|metrics| metrics.oom_events.last().cloned());
    match last {
        Some(victim) => {
            let why = if victim.by_limit { "its memory limit" } else { "the guest's memory" };
            format!(
                "out of memory: {why} was used up, and {} (pid {}) was killed",
                victim.name, victim.pid
            )
        }
        None => "out of memory: a process of the command was killed".to_owned(),
    }
}

/// The failure for a command that never ran; `names` are the flags' own words.
pub fn could_not_start(status: &ExitStatus, names: &Names) -> Failure {
    let code = status.shell_code();
    let ExecStatus::CouldNotStart { stage, errno } = status.status else {
        return Failure::silent(code);
    };
    let cause = exit::errno_text(errno);
    let Names { program, user, workdir } = names;
    let message = match stage {
        Stage::User => format!("--user: there is no '{user}' in the guest"),
        Stage::Credentials => format!("--user: cannot become '{user}' in the guest: {cause}"),
        Stage::Chdir => format!("--workdir: cannot enter {workdir} in the guest: {cause}"),
        Stage::Limits => format!("the guest cannot limit the command: {cause}"),
        Stage::Exec if code == exit::NOT_FOUND => format!("'{program}' was not found in the guest"),
        Stage::Exec => format!("'{program}' cannot be executed in the guest: {cause}"),
        _ => format!("the guest cannot start a process: {cause}"),
    };
    Failure { code, ..Failure::fault(message) }
}

/// What the user called things, for messages about them.
#[derive(Clone, Debug, Default)]
pub struct Names {
    program: String,
    user: String,
    workdir: String,
}

impl Names {
    pub fn of(argv: &[std::ffi::OsString], flags: &CommandFlags) -> Self {
        Self {
            program: argv.first().map_or_else(String::new, |word| word.display().to_string()),
            user: flags.user.clone().unwrap_or_default(),
            workdir: flags
                .workdir
                .as_ref()
                .map_or_else(String::new, |dir| dir.display().to_string()),
        }
    }
}

/// The failure for an exec that gave no exit status.
pub fn refuse(error: ExecError) -> Failure {
    match error {
        ExecError::Agent(error) => refuse_agent(error),
        ExecError::InvalidRequest { .. } => Failure::usage(error.to_string()),
        ExecError::NotStarted(status) => could_not_start(&status, &Names::default()),
        ExecError::Overdue(_) => Failure::fault(error.to_string()),
    }
}

/// The failure for a request that the agent did not carry out.
pub fn refuse_agent(error: AgentError) -> Failure {
    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
    let message = format!("{error}{}", cause.unwrap_or_default());
    match error {
        AgentError::InvalidRequest { .. } => Failure::usage(message),
        _ => Failure::fault(message),
    }
}
