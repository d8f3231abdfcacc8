//! The request to run a command, built step by step.
//!
//! A request that no guest could run is refused on the host, without a round trip to the guest.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::{DEFAULT_GRACE, DRAIN_TIME, MAX_ARGS, MAX_TIMEOUT};
use pvmm_guest_agent::message::{ByteBuf, Command, Exec, Limits, Request, WindowSize};

use super::ExecError;

/// Time that the guest and the connection may take beyond the time limit and the grace.
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

/// The number of first and last bytes that `exec` keeps of each output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputCap {
    /// The number of first bytes; 8 MiB by default.
    pub head: usize,
    /// The number of last bytes; 64 KiB by default.
    pub tail: usize,
}

impl Default for OutputCap {
    fn default() -> Self {
        Self { head: 8 << 20, tail: 64 << 10 }
    }
}

impl ExecRequest {
    /// Runs a program, found in the guest's PATH unless it contains a slash, with its arguments.
    pub fn argv<S: AsRef<OsStr>>(argv: impl IntoIterator<Item = S>) -> Self {
        let argv = argv.into_iter().map(|word| bytes(word.as_ref())).collect();
        Self::new(Command::Argv(argv))
    }

    /// Runs a line with the guest's `/bin/sh`.
    pub fn shell(line: impl AsRef<OsStr>) -> Self {
        Self::new(Command::Shell(bytes(line.as_ref())))
    }

    fn new(command: Command) -> Self {
        let wire = Exec::new(command);
        let cap = OutputCap::default();
        Self { wire, timeout: None, grace: DEFAULT_GRACE, input: Vec::new(), cap }
    }

    /// Adds a variable to the environment.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.wire.env.push((bytes(name.as_ref()), bytes(value.as_ref())));
        self
    }

    /// Leaves out the guest's default environment.
    pub fn clear_env(mut self) -> Self {
        self.wire.clear_env = true;
        self
    }

    /// Sets the working directory; `/` by default.
    pub fn cwd(mut self, directory: impl AsRef<Path>) -> Self {
        self.wire.cwd = Some(bytes(directory.as_ref().as_os_str()));
        self
    }

    /// Sets the user: `name`, `uid`, `name:group` or `uid:gid`; root by default.
    pub fn user(mut self, user: impl Into<String>) -> Self {
        self.wire.user = Some(user.into());
        self
    }

    /// For `start`: gives the process a standard input that the caller writes.
    pub fn piped_stdin(mut self) -> Self {
        self.wire.stdin = true;
        self
    }

    /// For `exec`: sets the standard input of the process.
    pub fn input(mut self, input: impl Into<Vec<u8>>) -> Self {
        self.wire.stdin = true;
        self.input = input.into();
        self
    }

    /// For `start`: gives the process a terminal. The caller writes to it, and all its output
    /// arrives as standard output.
    pub fn terminal(mut self, size: WindowSize) -> Self {
        self.wire.pty = Some(size);
        self.wire.stdin = true;
        self
    }

    /// Limits the resources of the process and all processes it starts together. If the guest
    /// cannot enforce the limits, nothing is started.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.wire.limits = Some(limits);
        self
    }

    /// Returns whether the process gets a terminal.
    pub fn has_terminal(&self) -> bool {
        self.wire.pty.is_some()
    }

    /// Ends the process and all processes it started after this time: SIGTERM, then SIGKILL after
    /// the grace.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout.min(MAX_TIMEOUT));
        self
    }

    /// Sets the time between SIGTERM and SIGKILL.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace.min(MAX_TIMEOUT);
        self
    }

    /// For `exec`: sets how much of each output is kept.
    pub fn output_cap(mut self, cap: OutputCap) -> Self {
        self.cap = cap;
        self
    }

    /// Refuses a request that no guest could run.
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

    /// Returns when the host stops waiting for a guest that should have ended the process.
    pub(super) fn deadline(&self) -> Option<(Instant, Duration)> {
        let late = self.grace + DRAIN_TIME + MARGIN;
        self.timeout.map(|timeout| (Instant::now() + timeout + late, late))
    }
}

fn bytes(text: &OsStr) -> ByteBuf {
    ByteBuf::from(text.as_bytes())
}
