//! The main command of a detached VM: started by the monitor process, its output kept in a log.
//!
//! The launcher is gone by then, so the monitor process is the agent's client, through the vsock
//! socket that all other clients use.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::exec::{ExecError, ExecRequest, ExecStatus, ExitStatus, Process, ProcessEvent};

use crate::failure::Failure;
use crate::guest_agent::{self, Names};
use crate::log_file::{LogWriter, Stream};
use crate::vm_dir::RunDir;

/// How long the agent, once ready, may take to start a process.
const START_PATIENCE: Duration = Duration::from_secs(30);
/// The interval between checks whether the process has started.
const START_STEP: Duration = Duration::from_millis(10);

/// A running main command.
pub struct MainCommand {
    /// Closed by the thread when the command has ended.
    done: PipeReader,
    status: mpsc::Receiver<ExitStatus>,
    // Dropping it would close the connection over which the command is watched.
    _agent: Agent,
}

impl MainCommand {
    /// Starts the command; fails, as `pvmm exec` does, if it cannot be started.
    pub fn start(dir: &RunDir, request: &ExecRequest, names: &Names) -> Result<Self, Failure> {
        let failed =
            |error: io::Error| Failure::fault(format!("cannot watch the command: {error}"));
        let log = LogWriter::create(&dir.output_log()).map_err(failed)?;
        let deadline = Instant::now() + START_PATIENCE;
        let agent = Agent::connect(&dir.vsock(), deadline).map_err(guest_agent::refuse)?;
        let process = agent.start(request).map_err(guest_agent::refuse_exec)?;
        let mut output = Output { process, log };
        output.wait_started(deadline, names)?;
        let (done, held) = io::pipe().map_err(failed)?;
        let (tell, status) = mpsc::channel();
        std::thread::Builder::new()
            .name("main-command".to_owned())
            .spawn(move || output.follow(&tell, held))
            .map_err(failed)?;
        Ok(Self { done, status, _agent: agent })
    }

    /// Returns how the command ended; `None` if the connection to the guest was lost.
    pub fn status(&self) -> Option<ExitStatus> {
        self.status.try_recv().ok()
    }
}

impl AsFd for MainCommand {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.done.as_fd()
    }
}

struct Output {
    process: Process,
    log: LogWriter,
}

impl Output {
    fn wait_started(&mut self, deadline: Instant, names: &Names) -> Result<(), Failure> {
        while self.process.pid().is_none() {
            let status =
                self.step(Some(Instant::now() + START_STEP)).map_err(guest_agent::refuse_exec)?;
            match status.map(|status| (status.status, status)) {
                Some((ExecStatus::CouldNotStart { .. }, status)) => {
                    return Err(guest_agent::could_not_start(&status, names));
                }
                // The command has already ended; the thread gets this status again.
                Some(_) => return Ok(()),
                None if Instant::now() >= deadline => {
                    return Err(Failure::fault("the agent did not start the command in time"));
                }
                None => {}
            }
        }
        Ok(())
    }

    fn follow(mut self, tell: &mpsc::Sender<ExitStatus>, held: PipeWriter) {
        loop {
            match self.step(None) {
                Ok(Some(status)) => {
                    let _ = tell.send(status);
                    break;
                }
                Ok(None) => {}
                Err(error) => {
                    log::warn!("the main command is lost: {error}");
                    break;
                }
            }
        }
        drop(held);
    }

    fn step(&mut self, deadline: Option<Instant>) -> Result<Option<ExitStatus>, ExecError> {
        let (stream, bytes) = match self.process.next_event(deadline)? {
            Some(ProcessEvent::Stdout(bytes)) => (Stream::Stdout, bytes),
            Some(ProcessEvent::Stderr(bytes)) => (Stream::Stderr, bytes),
            Some(ProcessEvent::Exited(status)) => return Ok(Some(status)),
            None => return Ok(None),
        };
        // A full disk loses log lines, but never stops the command.
        let _ = self.log.append_piece(stream, &bytes);
        Ok(None)
    }
}
