//! What can go wrong between a host and an agent.
//! Apart from `Refused`, every variant is about the connection and not about the request.

use std::io;
use std::path::PathBuf;

use pvmm_guest_agent::MessageError;
use pvmm_guest_agent::message::{Code, Failure, RefreshStep};

/// A request to an agent that gave no result.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("cannot reach the VM's vsock socket {}", path.display())]
    Dial {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the agent did not answer at {} in time", path.display())]
    NotListening { path: PathBuf },
    #[error("the handshake with the agent failed: {0}")]
    Handshake(&'static str),
    #[error("the agent speaks no protocol version of ours: {0:?}")]
    Version(String),
    #[error("cannot listen for the agent's ready signal at {}", path.display())]
    Listen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the agent did not say that it is ready in time")]
    NotReady,
    #[error("cannot set the agent's socket up")]
    Socket(#[source] io::Error),
    #[error("{field}: {why}")]
    InvalidRequest { field: &'static str, why: &'static str },
    #[error("the request cannot be sent")]
    Encode(#[source] MessageError),
    #[error("the agent has all the streams or connections it serves: try again later")]
    TooMany,
    #[error("the agent refused: {0}")]
    Refused(Refusal),
    #[error("the agent did not answer the request in time")]
    Overdue,
    #[error("the agent's answer does not fit the request")]
    WrongAnswer,
    #[error("the guest was not made its own, and its workload stands still: {step:?}: {why}")]
    NotRefreshed { step: RefreshStep, why: String },
    #[error(
        "secrets were delivered to the guest, and copies would hold them too: copy it before they are \
         delivered"
    )]
    HoldsSecrets,
    #[error("the host gives no random numbers")]
    Random(#[source] io::Error),
    #[error("there are more than {limit} {what}, which is the limit")]
    TooLarge { what: &'static str, limit: u64 },
    #[error("the watched directory is gone")]
    WatchEnded,
    #[error("the agent is lost: {0}")]
    Lost(Lost),
}

/// Why a connection is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Lost {
    #[error("it closed the connection")]
    Closed,
    #[error("it said goodbye ({0:?})")]
    Goodbye(Code),
    #[error("it did not take what was sent to it")]
    Stalled,
    #[error("it gave no sign of life")]
    Silent,
    #[error("it broke the protocol: {0}")]
    Protocol(&'static str),
    #[error("this end closed the connection")]
    Dropped,
}

/// The agent's words for why a request was not carried out. They come from the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub code: Code,
    pub errno: Option<i32>,
    pub path: Option<Vec<u8>>,
    pub message: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Escaped and cut: these bytes were chosen in the guest and may end on a terminal.
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
    /// The guest kernel's error number, where the request failed with one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Refused(refusal) => refusal.errno,
            _ => None,
        }
    }
}
