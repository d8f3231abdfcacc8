//! The standard inputs of processes that clients write to, one request after another.
//!
//! An input stays open between two requests. It is left open when it is put away here, and ends
//! only when a client says so.

use std::collections::HashMap;
use std::io;
use std::io::ErrorKind::{BrokenPipe, TimedOut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::exec::{AttachFrom, ExecError, Process, Stdin};

use super::error::CallError;

/// The most inputs that are kept open.
const MAX_OPEN: usize = 512;
/// The rest between two looks at an input that another request writes to.
const REST: Duration = Duration::from_millis(20);

/// A process of a sandbox, by the sandbox's id and the number that its guest has given.
pub type Key = (String, u64);

/// An input that stays open when it is dropped.
struct Input {
    stdin: Option<Stdin>,
    /// Dropping it detaches from the process.
    _process: Process,
}

impl Input {
    fn open(agent: &Agent, process: u64) -> Result<Self, ExecError> {
        // No output is asked for.
        let from = AttachFrom { stdout: u64::MAX, stderr: u64::MAX, input: true };
        let mut process = agent.attach(process, from)?;
        Ok(Self { stdin: process.take_stdin(), _process: process })
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        if let Some(stdin) = self.stdin.take() {
            stdin.leave_open();
        }
    }
}

type Shared = Arc<Mutex<Input>>;

/// The open inputs.
#[derive(Default)]
pub struct Inputs {
    open: Mutex<HashMap<Key, Shared>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inputs {
    /// Returns the input of a process, which is opened if it is not. Waits.
    fn get(&self, agent: &Agent, key: &Key) -> Result<Shared, ExecError> {
        if let Some(input) = lock(&self.open).get(key) {
            return Ok(Arc::clone(input));
        }
        let input = Arc::new(Mutex::new(Input::open(agent, key.1)?));
        let listed = agent.processes()?;
        let runs = |id: u64| listed.iter().any(|it| it.id == id && it.ended.is_none());
        let mut open = lock(&self.open);
        open.retain(|(sandbox, process), _| *sandbox != key.0 || runs(*process));
        if open.len() >= MAX_OPEN
            && let Some(any) = open.keys().next().cloned()
        {
            open.remove(&any);
        }
        Ok(Arc::clone(open.entry(key.clone()).or_insert(input)))
    }

    /// Writes to the input of a process. Waits while the process does not read, until the deadline.
    pub fn write(
        &self,
        agent: &Agent,
        key: &Key,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<(), CallError> {
        let known = lock(&self.open).contains_key(key);
        let mut written = self.try_write(agent, key, bytes, deadline)?;
        let is_lost = |it: &io::Result<()>| it.as_ref().is_err_and(|e| e.kind() != TimedOut);
        if known && is_lost(&written) {
            // The connection of an input that was opened before goes with a hibernation.
            self.forget(key);
            written = self.try_write(agent, key, bytes, deadline)?;
        }
        match written {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == TimedOut => {
                Err(CallError::new("deadline_exceeded", "the process does not read its input"))
            }
            Err(_) => {
                self.forget(key);
                let message = "the input of the process is closed, or was never open";
                Err(CallError::new("failed_precondition", message))
            }
        }
    }

    fn try_write(
        &self,
        agent: &Agent,
        key: &Key,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<io::Result<()>, ExecError> {
        let input = self.get(agent, key)?;
        loop {
            // Another request may wait for the process, which must not take all threads.
            match input.try_lock() {
                Ok(mut input) => {
                    return Ok(match &mut input.stdin {
                        Some(stdin) => stdin.write_all_until(bytes, deadline),
                        None => Err(BrokenPipe.into()),
                    });
                }
                Err(_) if Instant::now() >= deadline => return Ok(Err(TimedOut.into())),
                Err(_) => std::thread::sleep(REST),
            }
        }
    }

    /// Ends the input of a process.
    pub fn close(&self, agent: &Agent, key: &Key) -> Result<(), CallError> {
        let input = self.get(agent, key)?;
        let Ok(mut input) = input.try_lock() else {
            let message = "another request writes to the input of the process";
            return Err(CallError::new("failed_precondition", message));
        };
        let stdin = input.stdin.take();
        drop(input);
        self.forget(key);
        Ok(stdin.map_or(Ok(()), Stdin::close)?)
    }

    /// Forgets the input of a process.
    pub fn forget(&self, key: &Key) {
        lock(&self.open).remove(key);
    }
}
