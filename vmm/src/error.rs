//! The error that every public call returns: what failed, whose fault it is, whether to try again.
//!
//! Recipes and modules have error enums of their own beside their code; they meet here, so that a
//! caller can decide without knowing them.

use std::fmt;

/// Why a call failed.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    act: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// Whose fault an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller asked for something impossible; the message names the field.
    InvalidConfig,
    /// This host cannot do it.
    HostUnsupported,
    /// The host has no more memory, descriptors or disk; trying again later may help.
    HostResource,
    /// The guest did something that ended it.
    GuestFault,
    /// The agent in the guest went away.
    AgentLost,
    /// A deadline passed.
    Timeout,
    /// pvmm is wrong.
    Bug,
}

impl Error {
    /// An error of `kind` while doing `act`, caused by `source`.
    pub fn new(
        kind: ErrorKind,
        act: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self { kind, act: act.into(), source: Some(source.into()) }
    }

    /// An error with no deeper cause.
    pub fn plain(kind: ErrorKind, act: impl Into<String>) -> Self {
        Self { kind, act: act.into(), source: None }
    }

    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether the same call may succeed later without any change.
    pub fn is_retryable(&self) -> bool {
        matches!(self.kind, ErrorKind::HostResource | ErrorKind::Timeout)
    }
}

/// The act and then every cause, in one line.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.act)?;
        let mut cause = self.source.as_deref().map(|e| e as &dyn std::error::Error);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

// The causes are part of the message already; handing them out as a source too would print them twice.
impl std::error::Error for Error {}
