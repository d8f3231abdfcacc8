//! Connects a command in a guest to this process: its output, input, signals and exit code.
//!
//! Shared by `pvmm run`, `exec` and `attach`, so that a command behaves alike in all of them.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::exec::{
    ExecError, ExecRequest, ExecStatus, ExitStatus, Process, ProcessEvent, Signaller, Stdin,
};

use crate::cli::CommandFlags;
use crate::exit::{self, Failure, Outcome};
use crate::screen::Screen;
use crate::sys::terminal::{self, RawMode};
use pvmm_sandbox::guest_agent::{self, Names};
use pvmm_sandbox::sys::poll;
use pvmm_sandbox::sys::signals::Signals;

/// A second Ctrl-C within this time aborts, however the command handles the first.
const TWICE: Duration = Duration::from_secs(2);
/// How long a command may take to end after TERM, HUP or QUIT.
const SIGNAL_GRACE: Duration = Duration::from_secs(10);
/// The time between SIGTERM and SIGKILL for a command that exceeded its timeout.
const TIMEOUT_GRACE: Duration = Duration::from_secs(1);
/// How much longer than timeout and grace time the guest may take to report the end.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(2);

/// Builds the request for the command of a command line.
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
    if flags.interactive { request.piped_stdin() } else { request }
}

/// Refuses `-t` if standard input is not a terminal.
pub fn require_terminal(flags: &CommandFlags) -> Result<(), Failure> {
    if flags.tty && !io::stdin().is_terminal() {
        Err(Failure::usage("-t: standard input is not a terminal")
            .hint("leave -t out; -i alone passes standard input on"))
    } else {
        Ok(())
    }
}

/// How a followed command ended.
pub enum End {
    Exited(ExitStatus),
    /// Writing to this process's standard output failed: its reader is gone, or the disk is full.
    Output(io::Error),
    /// The command exceeded its timeout, and the guest did not end it.
    Overdue,
}

impl End {
    /// Returns the exit code, or a failure where the code alone would not explain the end.
    pub fn outcome(self, names: &Names) -> Outcome {
        match self {
            End::Exited(status) if matches!(status.status, ExecStatus::CouldNotStart { .. }) => {
                Err(guest_agent::could_not_start(&status, names))
            }
            End::Exited(status) => Ok(status.shell_code()),
            End::Output(error) => Err(error.into()),
            End::Overdue => Ok(exit::TIMEOUT),
        }
    }
}

/// Runs the command to its end. `abort` must end the process at once with the given exit code.
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
        // The size may have changed while the VM booted.
        request = request.terminal(terminal::size());
    }
    let process = agent.start(&request)?;
    let manner = Manner { has_terminal, owns: true };
    follow(process, late, manner, signals, abort)
}

/// How this process is attached to a command.
#[derive(Clone, Copy)]
pub struct Manner {
    /// The command has a terminal, connected to this process's terminal.
    pub has_terminal: bool,
    /// This process started the command, which ends with it.
    pub owns: bool,
}

/// Forwards output, input and signals between this process and the command, until the command ends.
pub fn follow(
    mut process: Process,
    late: Option<Instant>,
    manner: Manner,
    signals: Signals,
    abort: impl Fn(u8) + Send + Sync + 'static,
) -> Result<End, ExecError> {
    // Entered only now: until here Ctrl-C ends this process.
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
            // An error of writing to standard error cannot be reported.
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
                // The error message must start on its own line, wherever the command left the
                // cursor.
                if manner.has_terminal {
                    let _ = stderr.write(b"\r\n");
                }
                return Err(error);
            }
        }
    }
}

/// Resets the terminal modes that an interrupted program has changed.
fn calm(screen: &Mutex<Screen>) {
    let bytes = screen.lock().unwrap_or_else(PoisonError::into_inner).calm();
    // A terminal that cannot be written to needs no reset.
    let _ = Sink::new(&io::stdout()).write(&bytes);
}

/// Starts a thread that ends with the process. If that fails only a warning is printed, because the
/// command runs without it.
pub fn in_background(name: &str, work: impl FnOnce() + Send + 'static) {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    if let Err(error) = thread {
        crate::output::remark(false, &format!("warning: no thread for {name}: {error}"));
    }
}

/// Forwards signals to the command; aborts when it does not end in time.
fn forward_signals(signals: &Signals, signaller: &Signaller, manner: Manner, abort: &dyn Fn(u8)) {
    let mut last_interrupt: Option<Instant> = None;
    // When the command must have ended, and the signal that asked it to.
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
            // A failure means that the connection is lost, which the main thread reports.
            let _ = signaller.resize(terminal::size());
            continue;
        }
        if !manner.owns && signal != libc::SIGINT {
            // The command was not started here and keeps running.
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

/// Why input is no longer forwarded.
#[derive(Debug, PartialEq, Eq)]
enum InputEnd {
    Over,
    /// The user has pressed the key that leaves a guest that does not answer.
    Left,
}

/// Ctrl-], pressed three times within a second, leaves; a guest that hangs handles no other key.
const LEAVE_KEY: u8 = 0x1d;
const LEAVE_TIMES: usize = 3;
const LEAVE_TIME: Duration = Duration::from_secs(1);

/// Forwards standard input until its end, or until the command accepts no more.
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

/// Unbuffered standard output or error; waits for a terminal or pipe in non-blocking mode.
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

/// Describes the process that was killed for lack of memory, as the guest reports it.
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

/// Returns the user's arguments, for messages about them.
pub fn names(argv: &[std::ffi::OsString], flags: &CommandFlags) -> Names {
    Names {
        program: argv.first().map_or_else(String::new, |word| word.display().to_string()),
        user: flags.user.clone().unwrap_or_default(),
        workdir: flags.workdir.as_ref().map_or_else(String::new, |dir| dir.display().to_string()),
    }
}
