//! The standard input and outputs of a process: pipes, or one terminal for all three.
//! Both look the same to the loop: something to read, perhaps something to write.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use pvmm_guest_agent::message::{Exec, WindowSize};

use crate::{sys, terminal};

/// The two ends of one way; the process's own is closed here once it has it.
pub struct Ends {
    pub ours: OwnedFd,
    pub theirs: OwnedFd,
}

pub struct Stdio {
    pub input: Option<Ends>,
    pub output: Ends,
    /// `None` where errors go the way of the output, as on a terminal.
    pub error: Option<Ends>,
    /// Our side of the terminal, to change its size.
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
            Ok::<_, io::Error>(Ends { ours, theirs })
        };
        let from_process = || {
            let (ours, theirs) = sys::pipe()?;
            sys::set_nonblocking(&ours)?;
            Ok::<_, io::Error>(Ends { ours, theirs })
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
        // One descriptor for each use: they are watched and closed apart.
        Ok(Self {
            input: Some(Ends { ours: ours.try_clone()?, theirs: theirs.try_clone()? }),
            terminal: Some(ours.try_clone()?),
            output: Ends { ours, theirs },
            error: None,
        })
    }

    /// What becomes the process's descriptors 0, 1 and 2.
    pub fn theirs(&self, null: &OwnedFd) -> [RawFd; 3] {
        let input = self.input.as_ref().map_or(null, |ends| &ends.theirs);
        let error = self.error.as_ref().unwrap_or(&self.output);
        [input, &self.output.theirs, &error.theirs].map(AsRawFd::as_raw_fd)
    }
}
