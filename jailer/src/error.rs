//! Errors of the jailer, in one line that says what to do.

use std::fmt;
use std::io;

/// Why a jail could not be made.
#[derive(Debug)]
pub struct JailError {
    act: String,
    source: Option<io::Error>,
}

impl JailError {
    pub(crate) fn new(act: impl Into<String>, source: io::Error) -> Self {
        Self { act: act.into(), source: Some(source) }
    }

    pub(crate) fn plain(act: impl Into<String>) -> Self {
        Self { act: act.into(), source: None }
    }

    /// Returns a function for `map_err`.
    pub(crate) fn io(act: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::new(act, source)
    }
}

impl fmt::Display for JailError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.act)?;
        match &self.source {
            Some(source) if source.kind() == io::ErrorKind::PermissionDenied => {
                write!(f, ": {source}; run as root, or with the capabilities of root")
            }
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for JailError {}
