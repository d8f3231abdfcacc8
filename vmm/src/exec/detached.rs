//! Processes that outlive their client: started, listed, attached to again, ended.
//! They are known by a number that stays the same also in copies of the guest.

use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::MAX_DETACHED;
use pvmm_guest_agent::message::{
    Answer, Attach, Detach, ExecStatus, ProcessId, ProcessInfo, Request, Scope, SignalProcess,
};

pub use pvmm_guest_agent::message::{Detached, Kept, Replay};

use super::{ExecError, ExecRequest, ExitStatus, Process};
use crate::agent::{Agent, AgentError};

/// How long the agent may take over a request about a process.
const ANSWER_TIME: Duration = Duration::from_secs(60);

/// Where to begin in the output of a process, and whether to write to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttachFrom {
    pub stdout: u64,
    pub stderr: u64,
    /// Take its standard input as well.
    pub input: bool,
}

/// A detached process, as a listing has it. Its words come from the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub id: u64,
    pub pid: u32,
    pub command: String,
    pub age: Duration,
    pub terminal: bool,
    /// Clients that follow it now.
    pub attached: u32,
    /// What is kept of its outputs, by offsets.
    pub stdout: Kept,
    pub stderr: Kept,
    /// How it ended, if it has.
    pub ended: Option<ExitStatus>,
}

impl From<ProcessInfo> for Listed {
    fn from(info: ProcessInfo) -> Self {
        Self {
            id: info.id,
            pid: info.pid,
            command: info.command,
            age: Duration::from_micros(info.age_us),
            terminal: info.terminal,
            attached: info.attached,
            stdout: info.stdout,
            stderr: info.stderr,
            ended: info.report.map(ExitStatus::from_report),
        }
    }
}

impl Agent {
    /// Starts a command that goes on without this client. Its time limit holds, its output is kept
    /// by the agent, the newest `keep` bytes of each.
    pub fn start_detached(
        &self,
        request: &ExecRequest,
        keep: Option<u32>,
    ) -> Result<Detached, ExecError> {
        request.check()?;
        let mut wire = request.message();
        if let Request::Exec(exec) = &mut wire {
            exec.detach = Some(Detach { keep });
        }
        match self.ask(&wire, Instant::now() + ANSWER_TIME)? {
            Answer::Detached(detached) => Ok(detached),
            Answer::Exec(report) => match report.status {
                ExecStatus::CouldNotStart { .. } => {
                    Err(ExecError::NotStarted(Box::new(ExitStatus::from_report(report))))
                }
                _ => Err(AgentError::WrongAnswer.into()),
            },
            _ => Err(AgentError::WrongAnswer.into()),
        }
    }

    /// All detached processes, those that have ended among them.
    pub fn processes(&self) -> Result<Vec<Listed>, ExecError> {
        match self.ask(&Request::Processes {}, Instant::now() + ANSWER_TIME)? {
            Answer::Processes(list) if list.len() <= MAX_DETACHED => {
                Ok(list.into_iter().map(Listed::from).collect())
            }
            _ => Err(AgentError::WrongAnswer.into()),
        }
    }

    /// Follows a detached process: its output from the given offsets, then as it comes, then its
    /// end. Dropping the result only looks away. What was lost before the beginning is in
    /// [`Process::replay`], what is lost on the way in the counts of its end.
    pub fn attach(&self, id: u64, from: AttachFrom) -> Result<Process, ExecError> {
        let (stdout_from, stderr_from, input) = (from.stdout, from.stderr, from.input);
        let stream = self.open(&Request::Attach(Attach { id, stdout_from, stderr_from, input }))?;
        Ok(Process::new(stream, input, None))
    }

    /// Sends a signal to a detached process: its group, or with `tree` all that it started.
    pub fn signal_process(&self, id: u64, signal: i32, tree: bool) -> Result<(), ExecError> {
        if !(1..=64).contains(&signal) {
            return Err(ExecError::InvalidRequest { field: "signal", why: "is not in 1 to 64" });
        }
        let scope = if tree { Scope::Tree } else { Scope::Group };
        self.do_it(&Request::SignalProcess(SignalProcess { id, signal, scope }))
    }

    /// Kills what is left of a detached process and forgets it and its output.
    pub fn forget_process(&self, id: u64) -> Result<(), ExecError> {
        self.do_it(&Request::ForgetProcess(ProcessId { id }))
    }

    fn do_it(&self, request: &Request) -> Result<(), ExecError> {
        match self.ask(request, Instant::now() + ANSWER_TIME)? {
            Answer::Done {} => Ok(()),
            _ => Err(AgentError::WrongAnswer.into()),
        }
    }
}
