//! The standard inputs of processes that clients write to, one request after another.
//!
//! An input stays open between two requests. It is left open when it is put away here, and ends
//! only when a client says so.

use std::collections::HashMap;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use pvmm::agent::Agent;
use pvmm::exec::{AttachFrom, ExecError, Process, Stdin};

/// The most inputs that are kept open.
const MAX_OPEN: usize = 512;

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
    fn get(&self, agent: &Agent, key: &Key) -> Result<Shared, ExecError> {
        if let Some(input) = lock(&self.open).get(key) {
            return Ok(Arc::clone(input));
        }
        let input = Arc::new(Mutex::new(Input::open(agent, key.1)?));
        let mut open = lock(&self.open);
        if open.len() >= MAX_OPEN
            && let Some(any) = open.keys().next().cloned()
        {
            open.remove(&any);
        }
        Ok(Arc::clone(open.entry(key.clone()).or_insert(input)))
    }

    /// Writes to the input of a process. Waits while the process does not read.
    pub fn write(&self, agent: &Agent, key: &Key, bytes: &[u8]) -> Result<(), ExecError> {
        let known = lock(&self.open).contains_key(key);
        let written = self.try_write(agent, key, bytes)?;
        if written.is_ok() {
            return Ok(());
        }
        // The connection of an input that was opened before may be lost, as after a hibernation.
        self.forget(key);
        if known && self.try_write(agent, key, bytes)?.is_ok() {
            return Ok(());
        }
        self.forget(key);
        Err(ExecError::InvalidRequest { field: "stdin", why: "is closed, or was never open" })
    }

    fn try_write(
        &self,
        agent: &Agent,
        key: &Key,
        bytes: &[u8],
    ) -> Result<std::io::Result<()>, ExecError> {
        let input = self.get(agent, key)?;
        let mut input = lock(&input);
        match &mut input.stdin {
            Some(stdin) => Ok(stdin.write_all(bytes)),
            None => Ok(Err(std::io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// Ends the input of a process.
    pub fn close(&self, agent: &Agent, key: &Key) -> Result<(), ExecError> {
        let input = self.get(agent, key)?;
        let stdin = lock(&input).stdin.take();
        self.forget(key);
        stdin.map_or(Ok(()), Stdin::close)
    }

    /// Forgets the input of a process.
    pub fn forget(&self, key: &Key) {
        lock(&self.open).remove(key);
    }
}
