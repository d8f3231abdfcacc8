//! A vCPU thread: parked or running, told which by messages.
//!
//! ```text
//!           resume           resume            pause (kick)
//! no thread ───────► parked ───────► running ───────────────► parked
//!                       ▲               │ guest ended
//!                       └───────────────┘ (reported once to the owner)
//! ```
//!
//! A machine that is made ready and never runs costs no thread.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kvm_ioctls::VcpuFd;

use super::run::{self, Buses, Outcome, Stop};
use crate::kvm::state::{self, ClockMark, StateShape, VcpuStateV1};
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
    MarkClock(Sender<Result<ClockMark, KvmError>>),
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
    /// There until the thread starts.
    unborn: Option<Unborn>,
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

/// A vCPU that has not run yet.
struct Unborn {
    own: Own,
    name: String,
    buses: Arc<Buses>,
    report: Report,
}

/// Told once about every machine that ended, by whichever vCPU saw it.
pub type Report = Arc<dyn Fn(Outcome) + Send + Sync>;

impl VcpuThread {
    /// A vCPU without a thread; that starts when the guest first runs.
    pub fn new(
        id: u32,
        name: String,
        vcpu: VcpuFd,
        shape: Arc<StateShape>,
        buses: Arc<Buses>,
        report: Report,
    ) -> Result<Self, ThreadError> {
        unblock_while_running(&vcpu, sys::kick_signal()).map_err(ThreadError::Start)?;
        let unborn = Unborn { own: Own { id, vcpu, shape }, name, buses, report };
        Ok(Self { unborn: Some(unborn), commands: None, thread: None })
    }

    /// Starts the thread, parked, if there is none. It is born with all signals blocked, which are for the
    /// process's other threads: a kick that comes before it runs waits until it looks.
    pub fn start(&mut self) -> Result<(), ThreadError> {
        let Some(unborn) = self.unborn.take() else { return Ok(()) };
        let (commands, mailbox) = mpsc::channel();
        let thread =
            thread::Builder::new().name(unborn.name.clone()).stack_size(pvmm_devices::STACK_BYTES);
        // A thread that cannot be started must not take the vCPU with it.
        let cradle = Arc::new(Mutex::new(Some(unborn)));
        let theirs = cradle.clone();
        let live = move || {
            if let Some(unborn) = take(&theirs) {
                work(unborn, &mailbox);
            }
        };
        match sys::BlockedSignals::new().and_then(|_blocked| thread.spawn(live)) {
            Ok(thread) => {
                (self.commands, self.thread) = (Some(commands), Some(thread));
                Ok(())
            }
            Err(error) => {
                self.unborn = take(&cradle);
                Err(ThreadError::Start(error))
            }
        }
    }

    /// Lets the guest run, after `preparation` if there is one; the owner goes on meanwhile. The thread must have
    /// been started.
    pub fn resume(&self, preparation: Option<Preparation>) -> Result<(), ThreadError> {
        if let Some(preparation) = preparation {
            self.send(Command::Prepare(preparation))?;
        }
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

    /// Asks a parked vCPU what its time stamp counter shows.
    pub fn mark_clock(&self) -> Result<Answer<ClockMark>, ThreadError> {
        let (answer, reply) = mpsc::channel();
        self.send(Command::MarkClock(answer))?;
        Ok(Answer(reply))
    }

    /// How much processor time the vCPU has used so far.
    pub fn cpu_time(&self) -> Duration {
        self.thread.as_ref().map_or(Duration::ZERO, sys::cpu_time)
    }

    fn send(&self, command: Command) -> Result<(), ThreadError> {
        if let Some(unborn) = &self.unborn {
            unborn.own.obey(command, false);
            return Ok(());
        }
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

fn take(cradle: &Mutex<Option<Unborn>>) -> Option<Unborn> {
    cradle.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// What the thread owns.
struct Own {
    id: u32,
    vcpu: VcpuFd,
    shape: Arc<StateShape>,
}

impl Own {
    /// Does what a vCPU can do while it does not run; whether it shall run afterwards, who was `running` before.
    fn obey(&self, command: Command, running: bool) -> bool {
        // Whoever asked may have gone, and then needs no answer.
        match command {
            Command::Prepare(preparation) => preparation(&self.vcpu),
            Command::Resume => return true,
            Command::Pause(done) => {
                let _ = done.send(());
                return false;
            }
            Command::Save(answer) => {
                let _ = answer.send(state::save(&self.vcpu, self.id, &self.shape).map(Box::new));
            }
            Command::Load(saved, answer) => {
                let loaded = state::load(&self.vcpu, self.id, &saved, &self.shape, None);
                let _ = answer.send(loaded);
            }
            Command::MarkClock(answer) => {
                let _ = answer.send(state::mark_clock(&self.vcpu, self.id));
            }
        }
        running
    }
}

fn work(unborn: Unborn, mailbox: &Receiver<Command>) {
    let Unborn { mut own, buses, report, .. } = unborn;
    let mut running = false;
    loop {
        // A parked thread sleeps here; a running one only looks whether anything came.
        let command = match running {
            false => mailbox.recv().map_err(|_| mpsc::TryRecvError::Disconnected),
            true => mailbox.try_recv(),
        };
        match command {
            Ok(command) => running = own.obey(command, running),
            Err(mpsc::TryRecvError::Disconnected) => return,
            Err(mpsc::TryRecvError::Empty) => match run::run(&mut own.vcpu, &buses) {
                Stop::Kicked => sys::take_kick(),
                Stop::Ended(outcome) => {
                    running = false;
                    report(outcome);
                }
            },
        }
    }
}
