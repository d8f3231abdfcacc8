//! Formats an error with its causes on one line.
//!
//! Messages in this workspace never repeat their source, so the line repeats nothing.

use std::error::Error;
use std::fmt::Write;

pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}
