//! Failures: one line that says what went wrong, an optional hint, and who is at fault.
//!
//! Every door of pvmm renders them in its own way: the command line prints `error:` and `hint:` and
//! exits with the code, the service answers with a status.

use std::io;

use serde::{Deserialize, Serialize};

/// pvmm refuses the input: an invalid flag, a missing file, an unknown VM.
pub const USAGE: u8 = 2;
/// The command ran longer than `--timeout`.
pub const TIMEOUT: u8 = 124;
/// pvmm or its host failed, not the command.
pub const FAULT: u8 = 125;
/// The command does not exist in the guest.
pub const NOT_FOUND: u8 = 127;
/// The command was ended by signal n: 128 + n.
pub const SIGNAL_BASE: u8 = 128;

/// The kind of a failure, for programs: who is at fault, and what may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// The request cannot be carried out by anybody.
    InvalidInput,
    /// There is nothing of that name.
    NotFound,
    /// The sandbox, or its name, is in a state that does not allow it.
    Conflict,
    /// The host has not enough memory.
    NoMemory,
    /// A disk of the host is full.
    DiskFull,
    /// Something took longer than it may.
    Timeout,
    /// A VM that has just ended, or is about to answer again.
    Unreachable,
    /// pvmm or its host failed.
    Internal,
}

/// Why a command could not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: u8,
    /// Set where the code says too little; see [`Failure::kind`].
    pub special: Option<FailureKind>,
    pub message: String,
    /// Further lines of output, such as the end of the guest's console.
    pub context: Vec<String>,
    pub hint: Option<String>,
}

impl Failure {
    /// Builds a failure caused by the user's input; the message should name the field.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::silent(USAGE) }
    }

    /// Builds a failure caused by pvmm or the host.
    pub fn fault(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::silent(FAULT) }
    }

    /// Builds a failure without a message.
    pub fn silent(code: u8) -> Self {
        Self { code, special: None, message: String::new(), context: Vec::new(), hint: None }
    }

    /// Says more about the fault than the exit code does.
    pub fn of_kind(mut self, kind: FailureKind) -> Self {
        self.special = Some(kind);
        self
    }

    /// Returns whose fault it is.
    pub fn kind(&self) -> FailureKind {
        self.special.unwrap_or(match self.code {
            USAGE => FailureKind::InvalidInput,
            TIMEOUT => FailureKind::Timeout,
            _ => FailureKind::Internal,
        })
    }

    /// Adds a hint on what to try next.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// The exit code when the reader of standard output is gone: ends as other tools in a pipeline do.
pub const BROKEN_PIPE: u8 = SIGNAL_BASE + libc::SIGPIPE as u8;

/// Converts a failed write to standard output; a reader that is gone is not reported.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::silent(BROKEN_PIPE),
            _ => Self::fault(format!("cannot write the output: {}", io_text(&error))),
        }
    }
}

/// Returns the exit code for a command ended by `signal`.
pub fn by_signal(signal: i32) -> u8 {
    u8::try_from(signal).ok().and_then(|n| SIGNAL_BASE.checked_add(n)).unwrap_or(FAULT)
}

/// Describes an error number, without the number.
pub fn errno_text(errno: i32) -> String {
    let text = io::Error::from_raw_os_error(errno).to_string();
    match text.rfind(" (os error") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

/// Describes an I/O error, without its number.
pub fn io_text(error: &io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), errno_text)
}

/// Escapes control characters, which would break the line or control the terminal: a file name may
/// contain anything.
pub fn one_line(message: &str) -> String {
    let mut clean = String::with_capacity(message.len());
    for char in message.trim().chars() {
        if char.is_control() {
            clean.extend(char.escape_default());
        } else {
            clean.push(char)
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_signal_of_any_number_is_a_documented_code() {
        assert_eq!(by_signal(libc::SIGKILL), 137);
        assert_eq!(by_signal(64), 192);
        assert_eq!(by_signal(-1), FAULT);
        assert_eq!(by_signal(1000), FAULT);
    }

    #[test]
    fn broken_pipe_on_our_output_is_silent() {
        let failure = Failure::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!(failure, Failure::silent(141));
    }
}
