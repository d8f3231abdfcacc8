//! A running process: its events, its input, its signals.
//!
//! Dropping it ends the process, so that nothing keeps running in a guest unnoticed.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use pvmm_guest_agent::Channel;
use pvmm_guest_agent::message::{Answer, Outcome, Replay, Scope, Signal, WindowSize};

use super::{ExecError, ExitStatus};
use crate::agent::{AgentError, Event, Exchange, StreamRef};

/// An event of a running process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// Bytes of the standard output, or of the terminal.
    Stdout(Vec<u8>),
    /// Bytes of the standard error.
    Stderr(Vec<u8>),
    /// The process has ended. No other event follows.
    Exited(ExitStatus),
}

/// A process in the guest. Dropping it before its end kills it and all processes it started.
pub struct Process {
    stream: StreamRef,
    has_stdin: bool,
    deadline: Option<(Instant, Duration)>,
    exited: Option<ExitStatus>,
}

impl Process {
    pub(super) fn new(
        stream: StreamRef,
        has_stdin: bool,
        deadline: Option<(Instant, Duration)>,
    ) -> Self {
        Self { stream, has_stdin, deadline, exited: None }
    }

    /// Returns the process id in the guest, once the agent has sent it.
    pub fn pid(&self) -> Option<u32> {
        self.stream.started_now().and_then(|started| started.pid)
    }

    /// Returns where the output of an attached process begins. Waits for the agent until the
    /// deadline.
    pub fn replay(&self, deadline: Instant) -> Result<Option<Replay>, ExecError> {
        Ok(self.stream.started(Some(deadline))?.and_then(|started| started.replay))
    }

    /// Takes the standard input, once, if the request asked for one.
    pub fn take_stdin(&mut self) -> Option<Stdin> {
        std::mem::take(&mut self.has_stdin)
            .then(|| Stdin { stream: self.stream.clone(), ends: true })
    }

    /// Waits for the next event; returns `None` when the deadline passes first. After `Exited`,
    /// every call returns `Exited` again.
    pub fn next_event(
        &mut self,
        deadline: Option<Instant>,
    ) -> Result<Option<ProcessEvent>, ExecError> {
        if let Some(status) = self.exited {
            return Ok(Some(ProcessEvent::Exited(status)));
        }
        match self.stream.next(self.until(deadline))? {
            Some(event) => self.take(event).map(Some),
            None => self.late().map(|()| None),
        }
    }

    /// Sends input while there is some, until the next event.
    pub(super) fn next_while_feeding(
        &mut self,
        input: &mut &[u8],
    ) -> Result<ProcessEvent, ExecError> {
        loop {
            match self.stream.exchange(input, self.until(None))? {
                Some(Exchange::Event(event)) => return self.take(event),
                Some(Exchange::Sent(count)) if count < input.len() => *input = &input[count..],
                Some(Exchange::Sent(_) | Exchange::InputRefused) => {
                    *input = &[];
                    self.stream.end_input()?;
                }
                None => self.late()?,
            }
        }
    }

    pub(super) fn end_input(&self) -> Result<(), ExecError> {
        Ok(self.stream.end_input()?)
    }

    fn until(&self, deadline: Option<Instant>) -> Option<Instant> {
        let limit = self.deadline.map(|(at, _)| at);
        [deadline, limit].into_iter().flatten().min()
    }

    fn late(&self) -> Result<(), ExecError> {
        match self.deadline {
            Some((at, late)) if at <= Instant::now() => Err(ExecError::Overdue(late)),
            _ => Ok(()),
        }
    }

    fn take(&mut self, event: Event) -> Result<ProcessEvent, ExecError> {
        Ok(match event {
            Event::Data(Channel::Error, bytes) => ProcessEvent::Stderr(bytes),
            Event::Data(_, bytes) => ProcessEvent::Stdout(bytes),
            Event::Done(Outcome::Ok(Answer::Exec(report))) => {
                let status = ExitStatus::from_report(report);
                self.exited = Some(status);
                ProcessEvent::Exited(status)
            }
            Event::Done(Outcome::Ok(_)) => return Err(AgentError::WrongAnswer.into()),
            Event::Done(Outcome::Failed(failure)) => {
                return Err(AgentError::from(failure).into());
            }
        })
    }

    /// Sends a signal to the process group.
    pub fn signal(&self, signal: i32) -> Result<(), ExecError> {
        self.signaller().send(signal)
    }

    /// Returns a handle that signals the process from another thread.
    pub fn signaller(&self) -> Signaller {
        Signaller { stream: self.stream.clone() }
    }

    /// Kills the process and all processes it started.
    pub fn kill(&self) -> Result<(), ExecError> {
        let signal = Signal { signal: libc::SIGKILL, scope: Scope::Tree };
        Ok(self.stream.signal(&signal)?)
    }

    /// Waits for the end and discards output.
    pub fn wait(mut self) -> Result<ExitStatus, ExecError> {
        loop {
            if let Some(ProcessEvent::Exited(status)) = self.next_event(None)? {
                return Ok(status);
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stream.cancel();
    }
}

/// A handle that signals a process from another thread.
#[derive(Clone)]
pub struct Signaller {
    stream: StreamRef,
}

impl Signaller {
    /// Sends a signal to the process group.
    pub fn send(&self, signal: i32) -> Result<(), ExecError> {
        if !(1..=64).contains(&signal) {
            return Err(ExecError::InvalidRequest { field: "signal", why: "is not in 1 to 64" });
        }
        Ok(self.stream.signal(&Signal { signal, scope: Scope::Group })?)
    }

    /// Changes the size of the process's terminal, for a request that asked for one.
    pub fn resize(&self, size: WindowSize) -> Result<(), ExecError> {
        Ok(self.stream.resize(&size)?)
    }
}

/// The standard input of a process. Dropping or closing it ends the input.
pub struct Stdin {
    stream: StreamRef,
    ends: bool,
}

impl Stdin {
    /// Ends the input and reports whether that succeeded.
    pub fn close(self) -> Result<(), ExecError> {
        Ok(self.stream.end_input()?)
    }

    /// Writes all bytes; fails with `TimedOut` when the deadline passes before the process has read
    /// enough of them.
    pub fn write_all_until(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.stream.send_input(rest, Some(deadline)) {
                Ok(Some(0)) => return Err(io::ErrorKind::BrokenPipe.into()),
                Ok(Some(count)) => rest = &rest[count..],
                Ok(None) => return Err(io::ErrorKind::TimedOut.into()),
                Err(e) => return Err(io::Error::new(io::ErrorKind::ConnectionReset, e)),
            }
        }
        Ok(())
    }

    /// Leaves the input open for others that attach to the same process.
    pub fn leave_open(mut self) {
        self.ends = false;
    }
}

impl Write for Stdin {
    /// Waits while the process does not read; fails with `BrokenPipe` once it never will.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        match self.stream.send_input(bytes, None) {
            Ok(Some(0)) | Ok(None) => Err(io::ErrorKind::BrokenPipe.into()),
            Ok(Some(count)) => Ok(count),
            Err(e) => Err(io::Error::new(io::ErrorKind::ConnectionReset, e)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Stdin {
    fn drop(&mut self) {
        if self.ends {
            let _ = self.stream.end_input();
        }
    }
}
