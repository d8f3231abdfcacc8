//! A vCPU thread: parked or running, told which by messages.
//!
//! ```text
//!         resume            pause (kick)
//! parked ───────► running ───────────────► parked
//!    ▲               │ guest ended
//!    └───────────────┘ (reported once to the owner)
//! ```

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kvm_ioctls::VcpuFd;

use super::run::{self, Buses, Outcome, Stop};
use crate::kvm::state::{self, StateShape, VcpuStateV1};
use crate::kvm::vcpu::unblock_while_running;
use crate::kvm::vm::KvmError;
use crate::sys;

/// How long a kicked vCPU may take to answer. It only ever waits for the device thread.
const ANSWER: Duration = Duration::from_secs(10);

enum Command {
    Resume,
    Prepare(Preparation),
    Pause(Sender<()>),
    Save(Sender<Result<Box<VcpuStateV1>, KvmError>>),
    Load(Arc<VcpuStateV1>, Sender<Result<(), KvmError>>),
}

/// What a vCPU does once, before it first runs.
pub type Preparation = Box<dyn FnOnce(&VcpuFd) + Send + Sync>;

/// What went wrong with a vCPU thread.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    #[error("cannot start a vCPU thread")]
    Start(#[source] io::Error),
    #[error("a vCPU thread is gone")]
    Gone,
    #[error("a vCPU did not stop in time")]
    Stuck,
    #[error(transparent)]
    State(#[from] KvmError),
}

/// The owner's end of a vCPU thread. Dropping it stops the thread.
pub struct VcpuThread {
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

/// Told once about every machine that ended, by whichever vCPU saw it.
pub type Report = Arc<dyn Fn(Outcome) + Send + Sync>;

impl VcpuThread {
    /// Starts the thread, parked. The caller keeps signals blocked meanwhile (`sys::BlockedSignals`): then a
    /// kick, which may come before the thread runs, waits until it looks.
    pub fn start(
        id: u32,
        name: String,
        vcpu: VcpuFd,
        shape: Arc<StateShape>,
        buses: Arc<Buses>,
        report: Report,
    ) -> Result<Self, ThreadError> {
        let (commands, mailbox) = mpsc::channel();
        unblock_while_running(&vcpu, sys::kick_signal()).map_err(ThreadError::Start)?;
        let thread = thread::Builder::new()
            .name(name)
            .spawn(move || work(Parked { id, vcpu, shape }, &mailbox, &buses, &report))
            .map_err(ThreadError::Start)?;
        Ok(Self { commands: Some(commands), thread: Some(thread) })
    }

    /// Leaves a parked vCPU something to do; its owner goes on meanwhile.
    pub fn prepare(&self, preparation: Preparation) -> Result<(), ThreadError> {
        self.send(Command::Prepare(preparation))
    }

    /// Lets the guest run.
    pub fn resume(&self) -> Result<(), ThreadError> {
        self.send(Command::Resume)
    }

    /// Asks the thread to park; wait for it with the receiver, so that all vCPUs can stop at once.
    pub fn pause(&self) -> Result<Paused, ThreadError> {
        let (done, parked) = mpsc::channel();
        self.send(Command::Pause(done))?;
        self.kick();
        Ok(Paused(parked))
    }

    /// Asks a parked vCPU for its state.
    pub fn save(&self) -> Result<Answer<Box<VcpuStateV1>>, ThreadError> {
        let (answer, reply) = mpsc::channel();
        self.send(Command::Save(answer))?;
        Ok(Answer(reply))
    }

    /// Puts a parked vCPU into a state that it, or another one with the same features, was in.
    pub fn load(&self, state: Arc<VcpuStateV1>) -> Result<Answer<()>, ThreadError> {
        let (answer, reply) = mpsc::channel();
        self.send(Command::Load(state, answer))?;
        Ok(Answer(reply))
    }

    fn send(&self, command: Command) -> Result<(), ThreadError> {
        let commands = self.commands.as_ref().ok_or(ThreadError::Gone)?;
        commands.send(command).map_err(|_| ThreadError::Gone)
    }

    fn kick(&self) {
        if let Some(thread) = &self.thread {
            sys::kick(thread);
        }
    }
}

/// A pause that was asked for.
pub struct Paused(Receiver<()>);

impl Paused {
    pub fn wait(self) -> Result<(), ThreadError> {
        receive(&self.0)
    }
}

/// What a vCPU was asked for.
pub struct Answer<T>(Receiver<Result<T, KvmError>>);

impl<T> Answer<T> {
    pub fn wait(self) -> Result<T, ThreadError> {
        Ok(receive(&self.0)??)
    }
}

fn receive<T>(answers: &Receiver<T>) -> Result<T, ThreadError> {
    answers.recv_timeout(ANSWER).map_err(|error| match error {
        mpsc::RecvTimeoutError::Timeout => ThreadError::Stuck,
        mpsc::RecvTimeoutError::Disconnected => ThreadError::Gone,
    })
}

impl Drop for VcpuThread {
    fn drop(&mut self) {
        // A closed mailbox means stop; the kick makes the thread look.
        self.commands = None;
        self.kick();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread owns.
struct Parked {
    id: u32,
    vcpu: VcpuFd,
    shape: Arc<StateShape>,
}

fn work(mut own: Parked, mailbox: &Receiver<Command>, buses: &Arc<Buses>, report: &Report) {
    let mut running = false;
    loop {
        // A parked thread sleeps here; a running one only looks whether anything came.
        let command = match running {
            false => mailbox.recv().map_err(|_| mpsc::TryRecvError::Disconnected),
            true => mailbox.try_recv(),
        };
        match command {
            Ok(Command::Prepare(preparation)) => preparation(&own.vcpu),
            Ok(Command::Resume) => running = true,
            Ok(Command::Pause(done)) => {
                running = false;
                let _ = done.send(());
            }
            Ok(Command::Save(answer)) => {
                let _ = answer.send(state::save(&own.vcpu, own.id, &own.shape).map(Box::new));
            }
            Ok(Command::Load(saved, answer)) => {
                let _ = answer.send(state::load(&own.vcpu, own.id, &saved, &own.shape, None));
            }
            Err(mpsc::TryRecvError::Disconnected) => return,
            Err(mpsc::TryRecvError::Empty) => match run::run(&mut own.vcpu, buses) {
                Stop::Kicked => sys::take_kick(),
                Stop::Ended(outcome) => {
                    running = false;
                    report(outcome);
                }
            },
        }
    }
}
