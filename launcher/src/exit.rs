//! Exit codes, and failures printed as one `error:` line with an optional `hint:`.
//!
//! Every command ends here, so that scripts can rely on one table of exit codes and people on one
//! form of message.

use std::io::{self, Write as _};

pub use pvmm_sandbox::failure::{
    BROKEN_PIPE, Failure, NOT_FOUND, TIMEOUT, USAGE, by_signal, errno_text, io_text,
};

use crate::output;

/// The result of a command: the exit code, or why it failed.
pub type Outcome = Result<u8, Failure>;

/// Prints the failure, if there is one, and ends the process.
pub fn leave(outcome: Outcome) -> ! {
    // First, because in raw mode the lines below would not start at the left margin.
    crate::sys::terminal::restore();
    let code = match outcome {
        Ok(code) => code,
        Err(failure) => {
            report(&failure);
            failure.code
        }
    };
    // A failed flush can no longer be reported.
    let _ = io::stdout().flush();
    if code == BROKEN_PIPE {
        pvmm_sandbox::sys::signals::die_of(libc::SIGPIPE);
    }
    std::process::exit(code.into())
}

/// Writes `error:` and `hint:`, one line each.
pub fn report(failure: &Failure) {
    if failure.message.is_empty() {
        return;
    }
    let colour = output::stderr_has_colour();
    let mut text = line("error", "31", &failure.message, colour);
    for seen in &failure.context {
        text += &format!("  {}\n", output::one_line(seen));
    }
    if let Some(hint) = &failure.hint {
        text += &line("hint", "36", hint, colour);
    }
    // A failed write to standard error cannot be reported.
    let _ = io::stderr().write_all(text.as_bytes());
}

fn line(label: &str, sgr: &str, message: &str, colour: bool) -> String {
    let label = if colour { format!("\x1b[1;{sgr}m{label}:\x1b[0m") } else { format!("{label}:") };
    format!("{label} {}\n", output::one_line(message))
}
