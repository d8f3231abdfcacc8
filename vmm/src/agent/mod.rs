//! The host's end of the connection to the agent in a guest.
//!
//! The agent runs in the guest and is therefore untrusted: everything it sends is bounded, counted
//! or refused. `Agent` is cheap to clone and may be used from many threads; each request is a
//! stream of its own on one connection. Commands are run by [`crate::exec`].

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
    DirEntry, FileKind, Info, Metadata, Metrics, OomEvent, Owner, ShutdownHow, Welcome,
};

pub use error::{AgentError, Lost, Refusal};
pub use files::{FileReader, FileWriteOptions, FileWriter, LISTING_BYTES};
pub use forward::Forward;
pub use interpreter::{
    CodeError, CodeEvent, CodeOutput, CodeRequest, CodeRun, Interrupter, Language, MimeBundle,
    RunReport, RunStatus, SessionInfo, SessionOptions,
};
pub use ready::ReadyListener;
pub use refresh::{FreezeOptions, FrozenWorkload, Interface, Refresh, RefreshStep};
pub use sparse::{SparseError, SparseReader, SparseWriter};
pub use tcp::{GuestTcp, GuestTcpReader, GuestTcpWriter};
pub use watch::{Change, Watch, WatchEvent};

use connection::Connection;
pub(crate) use stream::{Event, Exchange, StreamRef};

/// The time limit of a request that streams nothing.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// The time limit of the handshake over an open socket.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// A connection to the agent in a guest.
#[derive(Clone)]
pub struct Agent {
    connection: Arc<Connection>,
}

impl Agent {
    /// Connects to the agent through the VM's vsock socket. Retries until the deadline while the
    /// agent is not listening yet.
    pub fn connect(uds: &Path, deadline: Instant) -> Result<Self, AgentError> {
        let (socket, welcome) = dial::connect(uds, AGENT_PORT, &[], deadline)?;
        Ok(Self { connection: Connection::new(socket, welcome)? })
    }

    /// Uses a socket that already leads to an agent, after a handshake.
    pub fn over(socket: UnixStream) -> Result<Self, AgentError> {
        let welcome = dial::handshake(&socket, Instant::now() + HANDSHAKE_TIME)?;
        Ok(Self { connection: Connection::new(socket, welcome)? })
    }

    /// Returns the welcome message of the agent.
    pub fn welcome(&self) -> &Welcome {
        self.connection.welcome()
    }

    /// Returns the number of frames that were ignored because they named no open stream.
    pub fn ignored_frames(&self) -> u64 {
        self.connection.ignored_frames()
    }

    /// Sends a ping and returns the time until its answer.
    pub fn ping(&self, deadline: Instant) -> Result<Duration, AgentError> {
        let begun = Instant::now();
        match self.ask(&Request::Ping {}, deadline)? {
            Answer::Done {} => Ok(begun.elapsed()),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Returns facts about the guest.
    pub fn info(&self) -> Result<Info, AgentError> {
        match self.ask(&Request::Info {}, Instant::now() + ANSWER_TIME)? {
            Answer::Info(info) => Ok(info),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Returns the guest's current resource use. Strings in it are chosen by the guest.
    pub fn metrics(&self) -> Result<Metrics, AgentError> {
        match self.ask(&Request::Metrics {}, Instant::now() + ANSWER_TIME)? {
            Answer::Metrics(metrics) => Ok(metrics),
            _ => Err(AgentError::WrongAnswer),
        }
    }

    /// Asks the guest to shut down; processes get `grace` between SIGTERM and SIGKILL.
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

    /// Sends a request that has a single answer and waits for it.
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
