//! The host's end of the connection to a guest's agent.
//! The agent is in the guest and so is hostile: whatever it sends is bounded, counted or refused.
//!
//! `Agent` is cheap to clone and may be used from many threads; each request is a stream of its
//! own on the one connection. Running commands is in [`crate::exec`].

mod connection;
mod dial;
mod error;
mod files;
mod forward;
mod interpreter;
mod pace;
mod ready;
mod refresh;
mod sparse;
mod stream;
mod tcp;
pub mod trees;
mod watch;

#[cfg(test)]
mod tests;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::AGENT_PORT;
use pvmm_guest_agent::message::{self, Answer, Outcome, Request};

pub use pvmm_guest_agent::message::{
    Entry, FileKind, Info, Metadata, Metrics, OomEvent, Owner, ShutdownHow, Welcome,
};

pub use error::{AgentError, Lost, Refusal};
pub use files::{FileReader, FileWriter, LISTING_BYTES, WriteOptions};
pub use forward::Forward;
pub use interpreter::{
    CodeError, CodeEvent, CodeOutput, CodeRequest, CodeRun, Interrupter, Language, MimeBundle,
    RunReport, RunStatus, SessionInfo, SessionOptions,
};
pub use ready::ReadyListener;
pub use refresh::{FreezeOptions, Frozen, Interface, Refresh, RefreshStep};
pub use sparse::{SparseError, SparseReader, SparseWriter};
pub use tcp::{GuestTcp, GuestTcpReader, GuestTcpWriter};
pub use watch::{Change, Watch, WatchEvent};

use connection::Connection;
pub(crate) use stream::{Event, Exchange, StreamRef};

/// How long a request that has nothing to stream may take.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// How long the handshake over an open socket may take.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// A connection to the agent in a guest.
#[derive(Clone)]
pub struct Agent {
    connection: Arc<Connection>,
}

impl Agent {
    /// Reaches the agent through the VM's vsock socket, trying until the deadline while the agent
    /// is not listening yet.
    pub fn connect(uds: &Path, deadline: Instant) -> Result<Self, AgentError> {
        let (socket, welcome) = dial::connect(uds, AGENT_PORT, &[], deadline)?;
        Ok(Self { connection: Connection::new(socket, welcome)? })
    }

    /// Talks to an agent over a socket that leads to it already.
    pub fn over(socket: UnixStream) -> Result<Self, AgentError> {
        let welcome = dial::handshake(&socket, Instant::now() + HANDSHAKE_TIME)?;
        Ok(Self { connection: Connection::new(socket, welcome)? })
    }

    /// What the agent said of itself.
    pub fn welcome(&self) -> &Welcome {
        self.connection.welcome()
    }

    /// Frames that were ignored because they spoke of no open stream.
    pub fn ignored_frames(&self) -> u64 {
        self.connection.ignored_frames()
    }

    /// Asks for a sign of life.
    pub fn ping(&self, deadline: Instant) -> Result<Duration, AgentError> {
        let begun = Instant::now();
        match self.ask(&Request::Ping {}, deadline)? {
            Answer::Done {} => Ok(begun.elapsed()),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Asks for facts about the guest.
    pub fn info(&self) -> Result<Info, AgentError> {
        match self.ask(&Request::Info {}, Instant::now() + ANSWER_TIME)? {
            Answer::Info(info) => Ok(info),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Asks what the guest uses now. The words in it come from the guest.
    pub fn metrics(&self) -> Result<Metrics, AgentError> {
        match self.ask(&Request::Metrics {}, Instant::now() + ANSWER_TIME)? {
            Answer::Metrics(metrics) => Ok(metrics),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Asks the guest to end; processes get `grace` between TERM and KILL.
    pub fn shutdown(&self, how: ShutdownHow, grace: Option<Duration>) -> Result<(), AgentError> {
        let grace_ms = grace.map(|grace| grace.as_millis() as u64);
        let request = Request::Shutdown(message::Shutdown { how, grace_ms });
        match self.ask(&request, Instant::now() + ANSWER_TIME)? {
            Answer::Done {} => Ok(()),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    pub(crate) fn open(&self, request: &Request) -> Result<StreamRef, AgentError> {
        StreamRef::open(&self.connection, request)
    }

    /// A request whose answer is all there is.
    pub(crate) fn ask(&self, request: &Request, deadline: Instant) -> Result<Answer, AgentError> {
        let stream = self.open(request)?;
        loop {
            match stream.next(Some(deadline))? {
                Some(Event::Done(Outcome::Ok(answer))) => return Ok(answer),
                Some(Event::Done(Outcome::Failed(failure))) => return Err(failure.into()),
                Some(Event::Data(..)) => {}
                None => {
                    stream.cancel();
                    return Err(AgentError::Overdue);
                }
            }
        }
    }
}
