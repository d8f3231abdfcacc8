//! The process that holds one machine: started by the launcher, reporting to it through a pipe.
//!
//! One VM is one process, so that whatever happens to a guest happens to nothing else. The one VM of a `run`
//! is a fork of its launcher without exec: nothing has to be passed on, and all slow work was done before.
//! Copies, of which one launcher starts many, are executed anew (`copy.rs`).

mod child;
mod console;
pub mod control;
pub mod copy;
mod main_command;

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm::Template;
use pvmm::exec::ExecRequest;
use serde::{Deserialize, Serialize};

use crate::attach::Names;
use crate::exit::{self, Failure};
use crate::log_file;
use crate::machine::Extras;
use crate::overrides::CopyParts;
use crate::ports::BoundPort;
use crate::prepare::Parts;
use crate::sys::process::{self, Ended, Side};
use crate::sys::signals::Signals;
use crate::sys::{poll, process::Child};
use crate::vm_dir::{Claim, Record, VmDir};

/// A report is a short line; a longer one is not ours.
const MAX_REPORT: usize = 64 << 10;
/// How many of the console's last lines an error shows.
const CONSOLE_LINES: usize = 10;
/// A process that was killed is gone at once, unless the kernel is stuck.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// What the process is to make and do.
pub struct Plan {
    pub start: Start,
    pub record: Record,
    /// A copy of the guest's console for the user, who then also gets the kernel's messages.
    pub console_copy: Option<File>,
    /// How long the guest may take until its agent answers.
    pub boot_patience: Duration,
    pub mode: Mode,
    /// Ports of the host that lead into a detached VM.
    pub ports: Vec<BoundPort>,
    /// What a machine that is booted has besides.
    pub extras: Extras,
    /// What a copy of a machine has of its own.
    pub copy: CopyParts,
}

/// What a machine begins with.
pub enum Start {
    /// A kernel and a root filesystem.
    Boot(Box<Parts>),
    /// A machine that was there before.
    Template(Arc<Template>),
}

/// Whose VM it is.
pub enum Mode {
    /// The launcher's: it ends with the launcher.
    Foreground,
    /// Nobody's: it ends with its main command, or when it is killed.
    Detached { command: Option<Box<(ExecRequest, Names)>> },
}

/// What the process tells the launcher, one line of JSON each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Report {
    /// The agent has answered and the main command, if there is one, has started.
    Ready,
    /// There will be no VM.
    Failed { code: u8, message: String, hint: Option<String> },
    /// The VM has ended by itself.
    Ended { reason: String, hint: Option<String> },
}

/// The VMM process as the launcher sees it.
pub struct VmmProcess {
    child: Child,
    reports: PipeReader,
    pending: Vec<u8>,
    dir: VmDir,
    /// Open for as long as the launcher lives; a process that ends with it watches the other end.
    _lifeline: Option<PipeWriter>,
}

/// Forks the process. The launcher must still have a single thread.
pub fn spawn(plan: Plan, claim: &Claim) -> Result<VmmProcess, Failure> {
    let failed =
        |error: io::Error| Failure::fault(format!("cannot start the VMM process: {error}"));
    let (reports, reporter) = io::pipe().map_err(failed)?;
    let (lifeline, held) = io::pipe().map_err(failed)?;
    let parent = std::process::id();
    match process::fork().map_err(failed)? {
        Side::Parent(child) => {
            let dir = claim.dir().clone();
            Ok(VmmProcess { child, reports, pending: Vec::new(), dir, _lifeline: Some(held) })
        }
        Side::Child => {
            drop((reports, held));
            let life =
                AssertUnwindSafe(|| child::run(plan, claim, reporter, Some(lifeline), parent));
            // A panic must not come back to the launcher's code: there it would end the VM's directory,
            // and then the launcher a second time.
            let _ = catch_unwind(life);
            process::leave_now(exit::FAULT.into())
        }
    }
}

impl VmmProcess {
    /// Waits until the guest answers; a signal or the deadline ends the wait and the VM.
    pub fn wait_ready(
        &mut self,
        signals: &Signals,
        deadline: Option<Instant>,
    ) -> Result<(), Failure> {
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let ready = poll::readable(&[signals.as_fd(), self.reports.as_fd()], left)?;
            if ready[0] {
                match signals.next()? {
                    // Of no interest before a program has the terminal.
                    libc::SIGWINCH => continue,
                    signal => return Err(Failure::silent(exit::by_signal(signal))),
                }
            }
            if ready[1] {
                match self.next_report()? {
                    Some(Report::Ready) => return Ok(()),
                    report => return Err(self.failure(report)),
                }
            }
            if left.is_some_and(|left| left.is_zero()) {
                let message = "--timeout passed before the guest had started";
                return Err(Failure { code: exit::TIMEOUT, ..Failure::fault(message) });
            }
        }
    }

    /// Why the VM is gone, once the connection to its agent has broken.
    pub fn why_gone(&mut self) -> Failure {
        let fds = [self.reports.as_fd()];
        match poll::readable(&fds, Some(END_PATIENCE)) {
            Ok(ready) if ready[0] => {
                let report = self.next_report().ok().flatten();
                self.failure(report)
            }
            // It is still there: only its agent has fallen silent.
            _ => self.with_console(Failure::fault("the guest no longer answers")),
        }
    }

    /// Ends the process, with the machine in it, and waits until both are gone.
    pub fn end(&mut self) {
        self.child.kill();
        // The kernel has been told; without a child there is nothing to wait for.
        let _ = self.child.wait();
    }

    /// The next line; none if the process is gone.
    fn next_report(&mut self) -> io::Result<Option<Report>> {
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            if self.pending.len() > MAX_REPORT {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let mut buffer = [0; 4096];
            match self.reports.read(&mut buffer)? {
                0 => return Ok(None),
                count => self.pending.extend_from_slice(&buffer[..count]),
            }
        }
    }

    fn failure(&mut self, report: Option<Report>) -> Failure {
        match report {
            Some(Report::Failed { code, message, hint }) => {
                self.with_console(Failure { code, hint, ..Failure::fault(message) })
            }
            Some(Report::Ended { reason, hint }) => {
                self.with_console(Failure { hint, ..Failure::fault(reason) })
            }
            Some(Report::Ready) => Failure::fault("the guest no longer answers"),
            None => self.crashed(),
        }
    }

    /// The process ended without a word.
    fn crashed(&mut self) -> Failure {
        self.child.kill();
        let how = match self.child.wait() {
            Ok(Ended::Code(code)) => format!("with code {code}"),
            Ok(Ended::Signal(signal)) => format!("by signal {signal}"),
            Err(error) => format!("({error})"),
        };
        let said = log_file::tail(&self.dir.vmm_log(), 1);
        let message = match said.is_empty() {
            true => format!("the VMM process ended {how}"),
            false => format!("the VMM process ended {how}: {said}"),
        };
        self.with_console(Failure::fault(message))
    }

    fn with_console(&self, mut failure: Failure) -> Failure {
        let console = log_file::tail(&self.dir.console_log(), CONSOLE_LINES);
        failure.context = console.lines().map(|line| format!("console: {line}")).collect();
        failure
    }
}

/// The process's end of the pipe.
struct Reporter {
    pipe: PipeWriter,
}

impl Reporter {
    /// A launcher that no longer listens is no reason to stop.
    fn tell(&mut self, report: &Report) {
        if let Ok(mut line) = serde_json::to_vec(report) {
            line.push(b'\n');
            let _ = self.pipe.write_all(&line);
        }
    }

    fn failed(&mut self, failure: Failure) {
        let Failure { code, message, hint, .. } = failure;
        self.tell(&Report::Failed { code, message, hint });
    }
}
