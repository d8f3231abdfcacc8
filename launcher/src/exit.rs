//! What the shell gets back: exit codes, and failures as one `error:` line with an optional `hint:`.
//!
//! Every verb ends here, so that a script can rely on one table of codes and a person on one shape of
//! message.

use std::fmt::Write as _;
use std::io::{self, Write as _};

/// Input that pvmm refuses: a bad flag, a missing file, an unknown VM.
pub const USAGE: u8 = 2;
/// The command ran longer than `--timeout`.
pub const TIMEOUT: u8 = 124;
/// pvmm or its host failed, not the command.
pub const FAULT: u8 = 125;
/// The command does not exist in the guest.
pub const NOT_FOUND: u8 = 127;
/// The command was ended by signal n: 128 + n.
pub const SIGNAL_BASE: u8 = 128;

/// What a verb returns: the exit code, or why there is none.
pub type Outcome = Result<u8, Failure>;

/// Why a verb could not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: u8,
    pub message: String,
    /// What was seen meanwhile, such as the guest's last words.
    pub context: Vec<String>,
    pub hint: Option<String>,
}

impl Failure {
    /// The caller's input is wrong; the message names the field.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::silent(USAGE) }
    }

    /// pvmm or the host is at fault.
    pub fn fault(message: impl Into<String>) -> Self {
        Self { message: message.into(), ..Self::silent(FAULT) }
    }

    /// An exit code with nothing to add to it.
    pub fn silent(code: u8) -> Self {
        Self { code, message: String::new(), context: Vec::new(), hint: None }
    }

    /// The same failure with the next thing to try.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// Standard output was closed by its reader: end the way other tools in a pipeline do.
pub const BROKEN_PIPE: u8 = SIGNAL_BASE + libc::SIGPIPE as u8;

/// A failure to write our own output; a reader that went away is no error to talk about.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::silent(BROKEN_PIPE),
            _ => Self::fault(format!("cannot write the output: {}", io_text(&error))),
        }
    }
}

/// The exit code for a command ended by `signal`.
pub fn by_signal(signal: i32) -> u8 {
    u8::try_from(signal).ok().and_then(|n| SIGNAL_BASE.checked_add(n)).unwrap_or(FAULT)
}

/// What an error number means, without the number.
pub fn errno_text(errno: i32) -> String {
    let text = io::Error::from_raw_os_error(errno).to_string();
    match text.rfind(" (os error") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}

/// An I/O error's meaning, without the number.
pub fn io_text(error: &io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), errno_text)
}

/// Prints the failure, if there is one, and ends the process.
pub fn leave(outcome: Outcome) -> ! {
    // Before the first word: in raw mode lines would not begin at the left.
    crate::sys::terminal::restore();
    let code = match outcome {
        Ok(code) => code,
        Err(failure) => {
            report(&failure);
            failure.code
        }
    };
    // A flush that fails has nobody left to tell.
    let _ = io::stdout().flush();
    if code == BROKEN_PIPE {
        crate::sys::signals::die_of(libc::SIGPIPE);
    }
    std::process::exit(code.into())
}

/// Writes `error:` and `hint:`, one line each.
pub fn report(failure: &Failure) {
    if failure.message.is_empty() {
        return;
    }
    let colour = crate::output::stderr_has_colour();
    let mut text = line("error", "31", &failure.message, colour);
    for seen in &failure.context {
        text += &format!("  {}\n", one_line(seen));
    }
    if let Some(hint) = &failure.hint {
        text += &line("hint", "36", hint, colour);
    }
    // Nowhere else to say it.
    let _ = io::stderr().write_all(text.as_bytes());
}

fn line(label: &str, sgr: &str, message: &str, colour: bool) -> String {
    let label = match colour {
        true => format!("\x1b[1;{sgr}m{label}:\x1b[0m"),
        false => format!("{label}:"),
    };
    format!("{label} {}\n", one_line(message))
}

/// The message without what would break the line or speak to the terminal: a file name may hold anything.
pub fn one_line(message: &str) -> String {
    let mut clean = String::with_capacity(message.len());
    for char in message.trim().chars() {
        match char.is_control() {
            true => {
                let _ = write!(clean, "{}", char.escape_default());
            }
            false => clean.push(char),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_of_hostile_text_has_no_control_characters() {
        assert_eq!(one_line("a\nb\x1b[31m\u{9b}c\n"), "a\\nb\\u{1b}[31m\\u{9b}c");
    }

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
