//! Processes that outlive their client: started, listed, attached to again, ended.
//!
//! They are identified by a number that stays valid in forks of the guest.

use std::time::{Duration, Instant};

use pvmm_guest_agent::limits::MAX_DETACHED;
use pvmm_guest_agent::message::{
    Answer, Attach, Detach, ExecStatus, ProcessId, ProcessInfo, Request, Scope, SignalProcess,
};

pub use pvmm_guest_agent::message::{Detached, Kept, Replay};

use super::{ExecError, ExecRequest, ExitStatus, Process};
use crate::agent::{Agent, AgentError};

/// The time limit of a request about a process.
const ANSWER_TIME: Duration = Duration::from_secs(60);

/// The offsets at which to start in the output of a process, and whether to write to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttachFrom {
    /// The offset in the standard output, in bytes from its beginning.
    pub stdout: u64,
    /// The offset in the standard error, in bytes from its beginning.
    pub stderr: u64,
    /// Attach to its standard input as well.
    pub input: bool,
}

/// A detached process in a listing. Strings in it are chosen by the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// The number that identifies the process, in forks of the guest too.
    pub id: u64,
    /// The process id in the guest.
    pub pid: u32,
    /// The beginning of the command line.
    pub command: String,
    /// The time since the process was started.
    pub age: Duration,
    /// The process has a terminal.
    pub terminal: bool,
    /// The number of attached clients.
    pub attached: u32,
    /// The range of its standard output that is kept.
    pub stdout: Kept,
    /// The range of its standard error that is kept.
    pub stderr: Kept,
    /// How the process ended, if it has.
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
    /// Starts a command that continues without this client. Its time limit stays in force, and the
    /// agent keeps the newest `keep` bytes of each output.
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

    /// Returns all detached processes, including those that have ended.
    pub fn processes(&self) -> Result<Vec<Listed>, ExecError> {
        match self.ask(&Request::Processes {}, Instant::now() + ANSWER_TIME)? {
            Answer::Processes(list) if list.len() <= MAX_DETACHED => {
                Ok(list.into_iter().map(Listed::from).collect())
            }
            _ => Err(AgentError::WrongAnswer.into()),
        }
    }

    /// Attaches to a detached process: returns its output from the given offsets, then new output,
    /// then its end. Dropping the result only detaches. Output lost before the start is in
    /// [`Process::replay`], output lost later in the counts of the exit status.
    pub fn attach(&self, id: u64, from: AttachFrom) -> Result<Process, ExecError> {
        let (stdout_from, stderr_from, input) = (from.stdout, from.stderr, from.input);
        let stream = self.open(&Request::Attach(Attach { id, stdout_from, stderr_from, input }))?;
        Ok(Process::new(stream, input, None))
    }

    /// Sends a signal to the group of a detached process, or with `tree` to all processes it
    /// started.
    pub fn signal_process(&self, id: u64, signal: i32, tree: bool) -> Result<(), ExecError> {
        if !(1..=64).contains(&signal) {
            return Err(ExecError::InvalidRequest { field: "signal", why: "is not in 1 to 64" });
        }
        let scope = if tree { Scope::Tree } else { Scope::Group };
        self.do_it(&Request::SignalProcess(SignalProcess { id, signal, scope }))
    }

    /// Kills the rest of a detached process and forgets it and its output.
    pub fn forget_process(&self, id: u64) -> Result<(), ExecError> {
        self.do_it(&Request::ForgetProcess(ProcessId { id, leave: false }))
    }

    /// Forgets a detached process that has ended and its output. What it started goes on, such as a
    /// server that a shell left in the background.
    pub fn leave_process(&self, id: u64) -> Result<(), ExecError> {
        self.do_it(&Request::ForgetProcess(ProcessId { id, leave: true }))
    }

    fn do_it(&self, request: &Request) -> Result<(), ExecError> {
        match self.ask(request, Instant::now() + ANSWER_TIME)? {
            Answer::Done {} => Ok(()),
            _ => Err(AgentError::WrongAnswer.into()),
        }
    }
}
