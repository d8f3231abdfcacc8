//! Errors of requests to an agent.
//!
//! Apart from `Refused`, every variant is about the connection and not about the request.

use std::io;
use std::path::PathBuf;

use crate::error::{Error, ErrorKind};
use pvmm_guest_agent::MessageError;
use pvmm_guest_agent::message::{Code, Failure, RefreshStep};

/// The reason why a request to an agent gave no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The VM's vsock socket does not accept a connection.
    #[error("cannot reach the VM's vsock socket {}", path.display())]
    Dial {
        /// The vsock socket.
        path: PathBuf,
        /// The error of the connection.
        #[source]
        source: io::Error,
    },
    /// Nothing in the guest listened on the port of the agent before the deadline.
    #[error("the agent did not answer at {} in time", path.display())]
    NotListening {
        /// The vsock socket.
        path: PathBuf,
    },
    /// The handshake did not end with a welcome.
    #[error("the handshake with the agent failed: {0}")]
    Handshake(&'static str),
    /// Host and agent have no protocol version in common.
    #[error("the agent speaks no protocol version of ours: {0:?}")]
    Version(String),
    /// The socket for the ready signal cannot be made or used.
    #[error("cannot listen for the agent's ready signal at {}", path.display())]
    Listen {
        /// The path of that socket.
        path: PathBuf,
        /// The error of the socket.
        #[source]
        source: io::Error,
    },
    /// The ready signal did not arrive before the deadline.
    #[error("the agent did not say that it is ready in time")]
    NotReady,
    /// An open socket to the agent, or the thread that reads it, cannot be prepared.
    #[error("cannot set the agent's socket up")]
    Socket(#[source] io::Error),
    /// The request can never work, and was not sent.
    #[error("{field}: {why}")]
    InvalidRequest {
        /// The part of the request that is wrong.
        field: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// The request does not fit into a frame.
    #[error("the request cannot be sent")]
    Encode(#[source] MessageError),
    /// A limit on the agent's streams or connections is reached.
    #[error("the agent has all the streams or connections it serves: try again later")]
    TooMany,
    /// The agent cannot do what was asked.
    #[error("the agent refused: {0}")]
    Refused(Refusal),
    /// The answer to the request did not arrive before the deadline.
    #[error("the agent did not answer the request in time")]
    Overdue,
    /// The agent answered with a message of another kind.
    #[error("the agent's answer does not fit the request")]
    WrongAnswer,
    /// A refresh failed, so the fork must not be used.
    #[error("the guest was not made its own, and its workload stands still: {step:?}: {why}")]
    NotRefreshed {
        /// The first step that failed or was not acknowledged.
        step: RefreshStep,
        /// The agent's explanation, escaped and shortened.
        why: String,
    },
    /// A guest that has received secrets was not frozen, since its forks would have them too.
    #[error(
        "secrets were delivered to the guest, and copies would hold them too: copy it before they are \
         delivered"
    )]
    HoldsSecrets,
    /// The random bytes of a refresh cannot be drawn on this host.
    #[error("the host gives no random numbers")]
    Random(#[source] io::Error),
    /// The guest has more to send than the caller accepts.
    #[error("there are more than {limit} {what}, which is the limit")]
    TooLarge {
        /// The things of which there are too many.
        what: &'static str,
        /// The most that is accepted.
        limit: u64,
    },
    /// A watch ended because its directory no longer exists.
    #[error("the watched directory is gone")]
    WatchEnded,
    /// The connection is lost, and every request on it fails.
    #[error("the agent is lost: {0}")]
    Lost(Lost),
}

impl AgentError {
    /// Returns whose fault the error is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotReady | Self::NotListening { .. } | Self::Overdue => ErrorKind::Timeout,
            Self::InvalidRequest { .. } | Self::HoldsSecrets => ErrorKind::InvalidConfig,
            Self::Listen { .. } | Self::Socket(_) | Self::TooMany | Self::Random(_) => {
                ErrorKind::HostResource
            }
            Self::Refused(_) | Self::TooLarge { .. } | Self::WatchEnded => ErrorKind::GuestRefused,
            Self::Encode(_) => ErrorKind::Bug,
            Self::Dial { .. }
            | Self::Handshake(_)
            | Self::Version(_)
            | Self::WrongAnswer
            | Self::NotRefreshed { .. }
            | Self::Lost(_) => ErrorKind::AgentLost,
        }
    }
}

impl From<AgentError> for Error {
    fn from(error: AgentError) -> Self {
        Self::new(error.kind(), "agent", error)
    }
}

/// The reason why a connection is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Lost {
    /// The agent closed the connection.
    #[error("it closed the connection")]
    Closed,
    /// The agent ended the connection for this reason.
    #[error("it said goodbye ({0:?})")]
    Goodbye(Code),
    /// The agent did not read in time.
    #[error("it did not take what was sent to it")]
    Stalled,
    /// The agent stayed silent although it was asked for a sign of life.
    #[error("it gave no sign of life")]
    Silent,
    /// The agent sent something that the protocol does not allow.
    #[error("it broke the protocol: {0}")]
    Protocol(&'static str),
    /// The request was answered before, so that no more is to come.
    #[error("it has answered already")]
    Ended,
    /// The host closed the connection, or cancelled the request.
    #[error("this end closed the connection")]
    Dropped,
}

/// The agent's reason why a request was not carried out. Its contents are chosen by the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The kind of the failure.
    pub code: Code,
    /// The guest kernel's error number; `None` if the kernel was not the cause.
    pub errno: Option<i32>,
    /// The path in the guest that the failure is about, if there is one.
    pub path: Option<Vec<u8>>,
    /// An explanation, which may be empty.
    pub message: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Escaped and shortened: these bytes were chosen in the guest and may be printed to a
        // terminal.
        if let Some(path) = &self.path {
            write!(f, "{}: ", path[..path.len().min(256)].escape_ascii())?;
        }
        match self.errno {
            Some(errno) => write!(f, "{}", io::Error::from_raw_os_error(errno))?,
            None => write!(f, "{:?}", self.code)?,
        }
        if !self.message.is_empty() {
            let message: String = self.message.chars().take(256).collect();
            write!(f, " ({})", message.escape_debug())?;
        }
        Ok(())
    }
}

impl From<Failure> for AgentError {
    fn from(failure: Failure) -> Self {
        if failure.code == Code::TooMany {
            return Self::TooMany;
        }
        Self::Refused(Refusal {
            code: failure.code,
            errno: failure.errno,
            path: failure.path.map(|path| path.into_vec()),
            message: failure.message,
        })
    }
}

impl AgentError {
    /// Returns the guest kernel's error number, if the request failed with one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused(refusal) => refusal.errno,
            _ => None,
        }
    }
}
