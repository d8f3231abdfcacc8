//! A process of a container, the first one or one that was added, from its creation to its end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::SystemTime;

use pvmm::agent::Agent;
use pvmm::exec::{ExecRequest, Signaller, WindowSize};

use crate::error::ShimError;
use crate::stdio::{self, InputEnd, Paths};

/// The size of a terminal before its user says otherwise.
const WINDOW: WindowSize = WindowSize { rows: 24, columns: 80 };
/// The exit status of a process that was killed, or whose VM is gone.
const KILLED: u32 = 128 + 9;

/// How a process ended, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    pub status: u32,
    pub at: SystemTime,
    /// Whether the guest killed it for lack of memory.
    pub oom: bool,
}

impl Exit {
    fn now(status: u32, oom: bool) -> Self {
        Self { status, at: SystemTime::now(), oom }
    }
}

/// Where a process is in its life.
pub enum Phase {
    Created,
    Running { control: Signaller },
    Ended(Exit),
}

/// The input of a process, which may be closed before the process starts.
enum Input {
    Open(Option<InputEnd>),
    Closed,
}

pub struct Process {
    pub paths: Paths,
    phase: Mutex<Phase>,
    changed: Condvar,
    input: Mutex<Input>,
    discard: AtomicBool,
}

impl Process {
    pub fn new(paths: Paths) -> Arc<Self> {
        Arc::new(Self {
            paths,
            phase: Mutex::new(Phase::Created),
            changed: Condvar::new(),
            input: Mutex::new(Input::Open(None)),
            discard: AtomicBool::new(false),
        })
    }

    /// Starts the process with a command of the guest, and follows it to its end, when `ended` is
    /// called.
    pub fn start(
        self: &Arc<Self>,
        agent: &Agent,
        request: ExecRequest,
        ended: impl FnOnce(Exit) + Send + 'static,
    ) -> Result<(), ShimError> {
        let mut phase = self.phase();
        if !matches!(*phase, Phase::Created) {
            return Err(ShimError::Conflict("the process was started before".to_owned()));
        }
        let (outputs, pipe) = (self.paths.open_outputs()?, self.paths.open_input()?);
        let request = match (self.paths.terminal, &pipe) {
            (true, _) => request.terminal(WINDOW),
            (false, Some(_)) => request.piped_stdin(),
            (false, None) => request,
        };
        let mut process = agent.start(&request)?;
        if let (Some(pipe), Some(input)) = (pipe, process.take_stdin()) {
            let end = stdio::feed(pipe, input)?;
            if let Input::Open(held) = &mut *lock(&self.input) {
                *held = Some(end);
            }
        }
        *phase = Phase::Running { control: process.signaller() };
        drop(phase);
        let followed = self.clone();
        let follow = move || {
            let exit = match outputs.follow(&mut process, &followed.discard) {
                Ok(status) => Exit::now(status.shell_code().into(), status.oom),
                Err(error) => {
                    log::warn!("the guest is lost: {error}");
                    Exit::now(KILLED, false)
                }
            };
            followed.close_input();
            followed.end(exit);
            ended(exit);
        };
        let thread = thread::Builder::new().name("process".to_owned()).spawn(follow);
        thread.map(drop).map_err(|error| {
            self.end(Exit::now(KILLED, false));
            ShimError::io("thread")(error)
        })
    }

    /// Ends a process that was never started.
    pub fn cancel(&self) -> Option<Exit> {
        let mut phase = self.phase();
        let never = matches!(*phase, Phase::Created);
        if never {
            *phase = Phase::Ended(Exit::now(KILLED, false));
            self.changed.notify_all();
        }
        exit_of(&phase).filter(|_| never)
    }

    /// Waits for the end.
    pub fn wait(&self) -> Exit {
        let mut phase = self.phase();
        loop {
            if let Some(exit) = exit_of(&phase) {
                return exit;
            }
            phase = self.changed.wait(phase).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Returns how the process ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        exit_of(&self.phase())
    }

    pub fn is_running(&self) -> bool {
        matches!(*self.phase(), Phase::Running { .. })
    }

    pub fn resize(&self, size: WindowSize) -> Result<(), ShimError> {
        match &*self.phase() {
            Phase::Running { control } => Ok(control.resize(size)?),
            _ => Ok(()),
        }
    }

    /// Kills the command of the guest that runs the process.
    pub fn kill(&self) -> Result<(), ShimError> {
        match &*self.phase() {
            Phase::Running { control } => Ok(control.send(9)?),
            _ => Ok(()),
        }
    }

    /// Ends the input.
    pub fn close_input(&self) {
        *lock(&self.input) = Input::Closed;
    }

    /// Drops the output from now on.
    pub fn discard_output(&self) {
        self.discard.store(true, Ordering::Relaxed);
    }

    fn end(&self, exit: Exit) {
        *self.phase() = Phase::Ended(exit);
        self.changed.notify_all();
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        lock(&self.phase)
    }
}

fn exit_of(phase: &Phase) -> Option<Exit> {
    match phase {
        Phase::Ended(exit) => Some(*exit),
        _ => None,
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_that_was_never_started_can_be_ended_once() {
        let process = Process::new(Paths::default());
        assert!(process.exit().is_none() && !process.is_running());
        assert_eq!(process.cancel().map(|exit| exit.status), Some(KILLED));
        assert!(process.cancel().is_none());
        assert_eq!(process.wait().status, KILLED);
    }
}
