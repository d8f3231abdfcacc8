//! Runs commands in the guest: the request, the running process, the collected output.
//!
//! A process ends with exactly one exit status, or with an error that says why there is none.

mod detached;
mod output;
mod process;
mod request;
mod status;

use std::time::Duration;

use pvmm_guest_agent::limits::MAX_TAIL;
use pvmm_guest_agent::message::{OutputLimit, Request};

pub use detached::{AttachFrom, Detached, Kept, Listed, Replay};
pub use output::{Captured, Output};
pub use process::{Process, ProcessEvent, Signaller, Stdin};
pub use pvmm_guest_agent::message::{ExecStatus, Limits, OutputCount, Stage, Usage, WindowSize};
pub use request::{ExecRequest, OutputCap};
pub use status::ExitStatus;

use crate::agent::{Agent, AgentError};
use crate::error::{Error, ErrorKind};
use output::Capture;

/// The reason why an exec gave no exit status.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// The request can never work, and was not sent.
    #[error("{field}: {why}")]
    InvalidRequest {
        /// The part of the request that is wrong.
        field: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// The guest did not report the end of a command that has passed its time limit by this long.
    #[error("the guest did not end the command {0:?} after its time limit")]
    Overdue(Duration),
    /// A detached command could not be started; the status says at which step.
    #[error("the command could not be started: {:?}", .0.status)]
    NotStarted(Box<ExitStatus>),
    /// The agent or the connection to it failed.
    #[error(transparent)]
    Agent(#[from] AgentError),
}

impl ExecError {
    /// Returns whose fault the error is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::InvalidRequest { .. } => ErrorKind::InvalidConfig,
            Self::Overdue(_) => ErrorKind::Timeout,
            Self::NotStarted(_) => ErrorKind::GuestRefused,
            Self::Agent(error) => error.kind(),
        }
    }
}

impl From<ExecError> for Error {
    fn from(error: ExecError) -> Self {
        Self::new(error.kind(), "exec", error)
    }
}

impl Agent {
    /// Starts a command; its output and its end arrive as events.
    pub fn start(&self, request: &ExecRequest) -> Result<Process, ExecError> {
        request.check()?;
        self.start_message(request, &request.message())
    }

    fn start_message(&self, request: &ExecRequest, wire: &Request) -> Result<Process, ExecError> {
        let deadline = request.deadline();
        let stream = self.open(wire)?;
        Ok(Process::new(stream, request.wire.stdin, deadline))
    }

    /// Runs a command to its end and collects its output, up to the request's cap.
    pub fn exec(&self, request: &ExecRequest) -> Result<Output, ExecError> {
        self.exec_with(request, |_| {})
    }

    /// Runs a command like [`Self::exec`], and gives `begun` a handle that signals it from another
    /// thread.
    pub fn exec_with(
        &self,
        request: &ExecRequest,
        begun: impl FnOnce(Signaller),
    ) -> Result<Output, ExecError> {
        request.check()?;
        let mut wire = request.message();
        if let Request::Exec(exec) = &mut wire {
            // Output that would be dropped here need not be sent.
            let tail = request.cap.tail.min(MAX_TAIL as usize) as u32;
            let beyond = request.cap.tail - tail as usize;
            let head = (request.cap.head as u64).saturating_add(beyond as u64);
            exec.output_limit = Some(OutputLimit { head, tail });
        }
        let mut process = self.start_message(request, &wire)?;
        begun(process.signaller());
        let mut input = &request.input[..];
        if request.wire.stdin && input.is_empty() {
            process.end_input()?;
        }
        let (mut stdout, mut stderr) = (Capture::new(request.cap), Capture::new(request.cap));
        let status = loop {
            match process.next_while_feeding(&mut input)? {
                ProcessEvent::Stdout(bytes) => stdout.push(&bytes),
                ProcessEvent::Stderr(bytes) => stderr.push(&bytes),
                ProcessEvent::Exited(status) => break status,
            }
        };
        Ok(Output {
            stdout: stdout.finish(status.stdout),
            stderr: stderr.finish(status.stderr),
            status,
        })
    }
}
