//! The standard input and outputs of a process: pipes, or one terminal for all three.
//!
//! Both have one interface for the event loop: something to read, perhaps something to write.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use pvmm_guest_agent::message::{Exec, WindowSize};

use crate::{sys, terminal};

/// The two ends of a pipe or terminal; the process's end is closed here once the process has it.
pub struct PipeEnds {
    pub ours: OwnedFd,
    pub theirs: OwnedFd,
}

pub struct Stdio {
    pub input: Option<PipeEnds>,
    pub output: PipeEnds,
    /// `None` where errors go to the output, as on a terminal.
    pub error: Option<PipeEnds>,
    /// The agent's side of the terminal, to change its size.
    pub terminal: Option<OwnedFd>,
}

impl Stdio {
    pub fn of(exec: &Exec, owner: Option<u32>) -> io::Result<Self> {
        match exec.pty {
            Some(size) => Self::terminal(size, owner),
            None => Self::pipes(exec.stdin),
        }
    }

    fn pipes(stdin: bool) -> io::Result<Self> {
        let to_process = || {
            let (theirs, ours) = sys::pipe()?;
            sys::set_nonblocking(&ours)?;
            Ok::<_, io::Error>(PipeEnds { ours, theirs })
        };
        let from_process = || {
            let (ours, theirs) = sys::pipe()?;
            sys::set_nonblocking(&ours)?;
            Ok::<_, io::Error>(PipeEnds { ours, theirs })
        };
        Ok(Self {
            input: if stdin { Some(to_process()?) } else { None },
            output: from_process()?,
            error: Some(from_process()?),
            terminal: None,
        })
    }

    fn terminal(size: WindowSize, owner: Option<u32>) -> io::Result<Self> {
        let (ours, theirs) = terminal::open(owner)?;
        terminal::resize(&ours, size)?;
        // One descriptor for each use, because they are watched and closed separately.
        Ok(Self {
            input: Some(PipeEnds { ours: ours.try_clone()?, theirs: theirs.try_clone()? }),
            terminal: Some(ours.try_clone()?),
            output: PipeEnds { ours, theirs },
            error: None,
        })
    }

    /// Returns the descriptors that become the process's 0, 1 and 2.
    pub fn theirs(&self, null: &OwnedFd) -> [RawFd; 3] {
        let input = self.input.as_ref().map_or(null, |ends| &ends.theirs);
        let error = self.error.as_ref().unwrap_or(&self.output);
        [input, &self.output.theirs, &error.theirs].map(AsRawFd::as_raw_fd)
    }
}
