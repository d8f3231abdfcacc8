//! The processes of one VM: a supervisor, and the monitor process in its jail.
//!
//! Each VM has its own, so that a fault of one guest affects no other. The launcher forks the
//! supervisor without exec: nothing has to be passed on, and all slow work is already done. Forks,
//! of which one launcher starts many, are executed anew (`copy.rs`). The supervisor forks the
//! monitor process (`child.rs`), whose reports come back through pipes.

mod child;
mod console;
pub mod control;
pub mod copy;
mod main_command;
pub mod shells;
mod supervisor;
pub mod volume;

pub use child::STILL_MAX;

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm::Template;
use pvmm::exec::ExecRequest;
use pvmm_egress::secrets::Placeholders;
use serde::{Deserialize, Serialize};

use crate::failure::{self, Failure, FailureKind};
use crate::guest_agent::Names;
use crate::log_file;
use crate::machine::Extras;
use crate::overrides::CopyParts;
use crate::ports::BoundPort;
use crate::prepare::Parts;
use crate::sys::dumps;
use crate::sys::poll;
use crate::sys::process::{self, Child, Side};
use crate::sys::signals::Signals;
use crate::vm_dir::{Claim, Record, VmDir};

/// The longest report; a longer line does not come from the monitor process.
const MAX_REPORT: usize = 64 << 10;
/// How many of the console's last lines an error shows.
const CONSOLE_LINES: usize = 10;
/// How long a killed process may take to end; only a stuck kernel needs more.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// Prepares a program that makes VMs; it must be the first call of its `main`. Does not return in a
/// process that such a program has started for a VM.
pub fn begin() -> io::Result<()> {
    end_on_panic();
    process::keep_one_heap();
    dumps::forbid()?;
    if std::env::args_os().next().is_some_and(|name| name == copy::NAME) {
        copy::run();
    }
    Ok(())
}

/// Aborts on panic: a panic is a bug, and a VM that has lost a thread must not continue.
fn end_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print(info);
        std::process::abort();
    }));
}

/// A VM that the monitor process makes and runs.
pub struct Plan {
    pub start: Start,
    pub record: Record,
    /// Where the guest's console is copied to, which includes the kernel's messages.
    pub console_copy: Option<File>,
    /// How long the guest may take until its agent answers.
    pub boot_patience: Duration,
    pub mode: Mode,
    /// Whether the monitor process is put into a jail.
    pub jailed: bool,
    /// How long the VM may live.
    pub ttl: Option<Duration>,
    /// Whether the workload of a fork is left standing still.
    pub still: bool,
    /// Ports of the host that are forwarded into a detached VM.
    pub ports: Vec<BoundPort>,
    /// Extra devices of a VM that is booted.
    pub extras: Extras,
    /// Overrides for a VM that is forked.
    pub copy: CopyParts,
    /// The placeholders of secrets that the guest is told.
    pub placeholders: Option<Placeholders>,
    /// The socket of a network card without a tap, once its egress process runs.
    pub frames: Option<OwnedFd>,
}

/// The initial state of a VM.
pub enum Start {
    /// A boot from a kernel and a root filesystem.
    Boot(Box<Parts>),
    /// A fork of a template.
    Template(Arc<Template>),
}

/// How long the VM lives.
pub enum Mode {
    /// The VM ends with the launcher.
    Foreground,
    /// The VM ends with its main command, or when it is killed.
    Detached { command: Option<Box<(ExecRequest, Names)>> },
}

/// A message from the monitor process to its supervisor, and from there to the launcher; one line
/// of JSON each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Report {
    /// The agent has answered and the main command, if there is one, has started.
    Ready { taps: Vec<String>, missing: Vec<String> },
    /// The vCPUs are paused by request, or run again.
    Paused(bool),
    /// The VM could not be started.
    Failed { code: u8, kind: Option<FailureKind>, message: String, hint: Option<String> },
    /// The VM has ended.
    Ended { exit_code: Option<u8>, reason: String, hint: Option<String> },
}

/// The reading end of a pipe with reports.
struct Reports {
    pipe: PipeReader,
    pending: Vec<u8>,
}

/// The launcher's handle of a VM's processes.
pub struct VmmProcess {
    supervisor: Child,
    reports: Reports,
    dir: VmDir,
    /// Open as long as the VM is to end with the launcher; the supervisor polls the other end.
    lifeline: Option<PipeWriter>,
}

/// Forks the supervisor, which starts the monitor process. The launcher must still have a single
/// thread.
pub fn spawn(plan: Plan, claim: &Claim) -> Result<VmmProcess, Failure> {
    let failed =
        |error: io::Error| Failure::fault(format!("cannot start the VMM process: {error}"));
    let (reports, reporter) = io::pipe().map_err(failed)?;
    let (lifeline, held) = io::pipe().map_err(failed)?;
    match process::fork().map_err(failed)? {
        Side::Parent(supervisor) => Ok(VmmProcess::new(supervisor, reports, held, claim)),
        Side::Child => {
            drop((reports, held));
            let life = AssertUnwindSafe(|| supervisor::run(plan, claim, reporter, lifeline));
            // A panic must not unwind into the launcher's code, which would remove the VM's
            // directory and then end the launcher a second time.
            let _ = catch_unwind(life);
            process::leave_now(failure::FAULT.into())
        }
    }
}

impl VmmProcess {
    fn new(supervisor: Child, reports: PipeReader, held: PipeWriter, claim: &Claim) -> Self {
        let (reports, dir) = (Reports::new(reports), claim.dir().clone());
        Self { supervisor, reports, dir, lifeline: Some(held) }
    }

    /// Waits until the guest's agent answers, and returns the layers that the jail lacks. A signal
    /// or the deadline makes it fail.
    pub fn wait_ready(
        &mut self,
        signals: Option<&Signals>,
        deadline: Option<Instant>,
    ) -> Result<Vec<String>, Failure> {
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let sources = [signals.map(AsFd::as_fd), Some(self.reports.as_fd())];
            let [signalled, reported] = poll::readable_of(sources, left)?;
            if let Some(signals) = signals.filter(|_| signalled) {
                match signals.next()? {
                    // Window size changes matter only once a program has the terminal.
                    libc::SIGWINCH => continue,
                    signal => return Err(Failure::silent(failure::by_signal(signal))),
                }
            }
            if reported {
                match self.reports.next()? {
                    Some(Report::Ready { missing, .. }) => return Ok(missing),
                    report => return Err(self.failure(report)),
                }
            }
            if left.is_some_and(|left| left.is_zero()) {
                let message = "the timeout passed before the guest had started";
                return Err(Failure { code: failure::TIMEOUT, ..Failure::fault(message) });
            }
        }
    }

    /// Returns why the VM is gone, once the connection to its agent has broken.
    pub fn why_gone(&mut self) -> Failure {
        let fds = [self.reports.as_fd()];
        match poll::readable(&fds, Some(END_PATIENCE)) {
            Ok(ready) if ready[0] => {
                let report = self.reports.next().ok().flatten();
                self.failure(report)
            }
            // The process is still there; only the agent does not answer.
            _ => self.with_console(Failure::fault("the guest no longer answers")),
        }
    }

    /// Returns the process that supervises the VM. A caller that lives on waits for its end.
    pub fn supervisor(&self) -> Child {
        Child::of(self.supervisor.pid())
    }

    /// Lets the VM live on without this process.
    pub fn keep(&mut self) -> Result<(), Failure> {
        let lifeline = self.lifeline.take();
        let told = lifeline.map_or(Ok(()), |mut lifeline| lifeline.write_all(&[supervisor::KEEP]));
        told.map_err(|error| Failure::fault(format!("the VM has ended at once: {error}")))
    }

    /// Ends the VM and waits until its processes are gone.
    pub fn end(&mut self) {
        self.lifeline = None;
        let deadline = Instant::now() + END_PATIENCE;
        // The supervisor ends the monitor process, removes the VM's files and ends.
        while let left = deadline.saturating_duration_since(Instant::now())
            && !left.is_zero()
            && poll::readable(&[self.reports.as_fd()], Some(left)).is_ok()
            && matches!(self.reports.next(), Ok(Some(_)))
        {}
        self.supervisor.kill();
        // An error means that there is no child to wait for.
        let _ = self.supervisor.wait();
    }

    fn failure(&mut self, report: Option<Report>) -> Failure {
        match report {
            Some(Report::Failed { code, kind, message, hint }) => {
                let special = kind;
                self.with_console(Failure { code, special, hint, ..Failure::fault(message) })
            }
            Some(Report::Ended { reason, hint, .. }) => {
                let message = format!("the VM has ended: {reason}");
                self.with_console(Failure { hint, ..Failure::fault(message) })
            }
            Some(Report::Ready { .. } | Report::Paused(_)) => {
                Failure::fault("the guest no longer answers")
            }
            None => self.with_console(Failure::fault("the supervisor of the VM was killed")),
        }
    }

    fn with_console(&self, mut failure: Failure) -> Failure {
        let console = log_file::tail(&self.dir.run().console_log(), CONSOLE_LINES);
        failure.context = console.lines().map(|line| format!("console: {line}")).collect();
        failure
    }
}

impl Reports {
    fn new(pipe: PipeReader) -> Self {
        Self { pipe, pending: Vec::new() }
    }

    /// Reads the next report; `None` if the writer is gone.
    fn next(&mut self) -> io::Result<Option<Report>> {
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            if self.pending.len() > MAX_REPORT {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let mut buffer = [0; 4096];
            match self.pipe.read(&mut buffer)? {
                0 => return Ok(None),
                count => self.pending.extend_from_slice(&buffer[..count]),
            }
        }
    }
}

impl AsFd for Reports {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

/// The writing end of a pipe with reports.
struct Reporter {
    pipe: PipeWriter,
}

impl Reporter {
    /// Sends a report; a reader that is gone is no error.
    fn tell(&mut self, report: &Report) {
        if let Ok(mut line) = serde_json::to_vec(report) {
            line.push(b'\n');
            let _ = self.pipe.write_all(&line);
        }
    }

    fn failed(&mut self, failure: Failure) {
        let Failure { code, special: kind, message, hint, .. } = failure;
        self.tell(&Report::Failed { code, kind, message, hint });
    }
}
