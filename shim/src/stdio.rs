//! Standard input and output of a process: pipes of containerd on this side, the agent's stream on
//! the other.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use pvmm::exec::{ExitStatus, Process, ProcessEvent, Stdin};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;

use crate::error::ShimError;

const CHUNK: usize = 64 << 10;
/// How often a copy that waits looks whether it is still needed.
const LOOK: Duration = Duration::from_millis(200);

/// The paths of the pipes, as containerd gives them; an empty one is not used.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
}

impl Paths {
    /// Opens the pipes for output.
    pub fn open_outputs(&self) -> Result<Outputs, ShimError> {
        let open = |path: &str| match path {
            "" => Ok(None),
            path => open_pipe(path).map(Some),
        };
        let stderr = if self.terminal { None } else { open(&self.stderr)? };
        Ok(Outputs { stdout: open(&self.stdout)?, stderr })
    }

    /// Opens the pipe for input.
    pub fn open_input(&self) -> Result<Option<File>, ShimError> {
        if self.stdin.is_empty() { Ok(None) } else { open_pipe(&self.stdin).map(Some) }
    }
}

/// Opens a named pipe for reading and writing: that waits for nobody, and a reader that comes and
/// goes, as `ctr task attach` does, neither ends the output nor the process.
fn open_pipe(path: &str) -> Result<File, ShimError> {
    // containerd 1.6 and later say how a path is meant; loggers are programs.
    let path = path.strip_prefix("fifo://").unwrap_or(path);
    if let Some((scheme, _)) = path.split_once("://")
        && scheme != "file"
    {
        return Err(ShimError::Invalid(format!("output to {scheme}:// is not supported")));
    }
    let file = path.strip_prefix("file://");
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(file.is_some())
        .append(file.is_some())
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open(file.unwrap_or(path))
        .map_err(ShimError::io(format!("cannot open {path}")))
}

/// Where the output of a process goes.
pub struct Outputs {
    stdout: Option<File>,
    stderr: Option<File>,
}

impl Outputs {
    /// Copies output until the process ends. As long as nobody reads, the process waits; once
    /// `discard` is set, output that nobody reads is dropped, so that a killed one is seen to end.
    pub fn follow(
        mut self,
        process: &mut Process,
        discard: &AtomicBool,
    ) -> Result<ExitStatus, ShimError> {
        loop {
            let (file, bytes) = match process.next_event(None)? {
                Some(ProcessEvent::Stdout(bytes)) => (&mut self.stdout, bytes),
                Some(ProcessEvent::Stderr(bytes)) => (&mut self.stderr, bytes),
                Some(ProcessEvent::Exited(status)) => return Ok(status),
                None => continue,
            };
            if file.as_mut().is_some_and(|file| write(file, &bytes, discard).is_err()) {
                *file = None;
            }
        }
    }
}

fn write(file: &mut File, mut bytes: &[u8], discard: &AtomicBool) -> io::Result<()> {
    while !bytes.is_empty() {
        if !wait([(file.as_fd(), PollFlags::OUT)])?[0] {
            if discard.load(Ordering::Relaxed) {
                break;
            }
            continue;
        }
        match file.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => (),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until one of the files is ready, a short time at most; returns which are.
fn wait<const N: usize>(files: [(BorrowedFd<'_>, PollFlags); N]) -> io::Result<[bool; N]> {
    let mut ready = files.map(|(file, what)| PollFd::from_borrowed_fd(file, what));
    let time = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
    rustix::event::poll(&mut ready, Some(&time))?;
    Ok(ready.map(|one| !one.revents().is_empty()))
}

/// The end of a process's input: dropping it ends the input.
pub struct InputEnd {
    _held: OwnedFd,
}

/// Copies a pipe to the input of a process in a thread of its own, until the end of either or of
/// the value that is returned.
pub fn feed(pipe: File, mut input: Stdin) -> Result<InputEnd, ShimError> {
    let (held, watched) = {
        let (reader, writer) = io::pipe().map_err(ShimError::io("pipe"))?;
        (OwnedFd::from(writer), reader)
    };
    let copy = move || {
        let mut pipe = pipe;
        let mut chunk = vec![0; CHUNK];
        loop {
            let files = [pipe.as_fd(), watched.as_fd()].map(|file| (file, PollFlags::IN));
            let Ok([has_input, is_over]) = wait(files) else { return };
            if has_input {
                match pipe.read(&mut chunk) {
                    Ok(count @ 1..) if input.write_all(&chunk[..count]).is_ok() => (),
                    _ => return,
                }
            } else if is_over {
                return;
            }
        }
    };
    thread::Builder::new().name("stdin".to_owned()).spawn(copy).map_err(ShimError::io("thread"))?;
    Ok(InputEnd { _held: held })
}
