//! What to run: built step by step, refused here where no guest could run it.
//! The checks are on this side so that a mistake costs no trip into the guest.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::{DEFAULT_GRACE, DRAIN_TIME, MAX_ARGS, MAX_TIMEOUT};
use pvmm_guest_agent::message::{ByteBuf, Command, Exec, Limits, Request, WindowSize};

use super::ExecError;

/// What the guest and the way to it may take beyond the time limit and the grace.
const MARGIN: Duration = Duration::from_secs(5);

/// A command to run.
#[derive(Debug, Clone)]
pub struct ExecRequest {
    pub(super) wire: Exec,
    timeout: Option<Duration>,
    grace: Duration,
    pub(super) input: Vec<u8>,
    pub(super) cap: OutputCap,
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
        let wire = Exec::new(command);
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

    /// For `start`: gives the process a terminal, to which the caller writes and from which all its
    /// output comes as standard output.
    pub fn terminal(mut self, size: WindowSize) -> Self {
        self.wire.pty = Some(size);
        self.wire.stdin = true;
        self
    }

    /// What the process and all it starts may use together. Where the guest cannot keep to it,
    /// nothing is started.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.wire.limits = Some(limits);
        self
    }

    pub fn has_terminal(&self) -> bool {
        self.wire.pty.is_some()
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
    pub(super) fn check(&self) -> Result<(), ExecError> {
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

    pub(super) fn message(&self) -> Request {
        let mut wire = self.wire.clone();
        wire.timeout_ms = self.timeout.map(|timeout| timeout.as_millis() as u64);
        wire.grace_ms = Some(self.grace.as_millis() as u64);
        Request::Exec(wire)
    }

    /// When this side stops waiting for a guest that should long have ended the process.
    pub(super) fn deadline(&self) -> Option<(Instant, Duration)> {
        let late = self.grace + DRAIN_TIME + MARGIN;
        self.timeout.map(|timeout| (Instant::now() + timeout + late, late))
    }
}

fn bytes(text: &OsStr) -> ByteBuf {
    ByteBuf::from(text.as_bytes())
}
