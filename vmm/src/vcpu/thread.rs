//! A vCPU thread, parked or running, controlled by commands.
//!
//! ```text
//!           resume           resume            pause (kick)
//! no thread ───────► parked ───────► running ───────────────► parked
//!                       ▲               │ guest ended
//!                       └───────────────┘ (reported once to the owner)
//! ```
//!
//! A VM that is prepared and never runs costs no thread.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kvm_ioctls::VcpuFd;
use pvmm_devices::ThreadEntry;

use super::run::{self, Buses, Stop};
use crate::error::{Error, ErrorKind};
use crate::kvm::state::{self, ClockMark, StateShape, VcpuStateV1};
use crate::kvm::vcpu::unblock_while_running;
use crate::kvm::vm::KvmError;
use crate::outcome::Report;
use crate::sys;

/// The time limit of a kicked vCPU. It only ever waits for the device thread.
const ANSWER: Duration = Duration::from_secs(10);

enum Command {
    Resume,
    Prepare(Preparation),
    Pause(Sender<()>),
    Save(Sender<Result<Box<VcpuStateV1>, KvmError>>),
    Load(Arc<VcpuStateV1>, Sender<Result<(), KvmError>>),
    MarkClock(Sender<Result<ClockMark, KvmError>>),
}

/// A step that a vCPU does once, before it first runs.
pub type Preparation = Box<dyn FnOnce(&VcpuFd) + Send + Sync>;

/// Errors of a vCPU thread.
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

impl ThreadError {
    /// Returns whose fault the error is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Start(_) => ErrorKind::HostResource,
            Self::Gone => ErrorKind::Bug,
            Self::Stuck => ErrorKind::Timeout,
            Self::State(error) => error.kind(),
        }
    }
}

impl From<ThreadError> for Error {
    fn from(error: ThreadError) -> Self {
        match error {
            ThreadError::State(error) => error.into(),
            error => Self::new(error.kind(), "vCPU", error),
        }
    }
}

/// The owner's handle of a vCPU thread. Dropping it stops the thread.
pub struct VcpuThread {
    /// The vCPU, until the thread starts.
    unstarted: Option<UnstartedVcpu>,
    commands: Option<Sender<Command>>,
    thread: Option<JoinHandle<()>>,
}

/// A vCPU that has not run yet.
struct UnstartedVcpu {
    own: OwnedVcpu,
    name: String,
    buses: Arc<Buses>,
    report: Report,
    entry: Option<ThreadEntry>,
}

impl VcpuThread {
    /// Creates a vCPU without a thread, which starts when the guest first runs, with `entry` as its
    /// first step.
    pub fn new(
        id: u32,
        name: String,
        vcpu: VcpuFd,
        shape: Arc<StateShape>,
        buses: Arc<Buses>,
        report: Report,
        entry: Option<ThreadEntry>,
    ) -> Result<Self, ThreadError> {
        unblock_while_running(&vcpu, sys::kick_signal()).map_err(ThreadError::Start)?;
        let own = OwnedVcpu { id, vcpu, shape };
        let unstarted = UnstartedVcpu { own, name, buses, report, entry };
        Ok(Self { unstarted: Some(unstarted), commands: None, thread: None })
    }

    /// Starts the thread, parked, if there is none. It starts with the signals of others blocked,
    /// which are left to the other threads of the process: a kick that comes before it runs stays
    /// pending.
    pub fn start(&mut self) -> Result<(), ThreadError> {
        let Some(unstarted) = self.unstarted.take() else { return Ok(()) };
        let (commands, mailbox) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(unstarted.name.clone())
            .stack_size(pvmm_devices::STACK_BYTES);
        // A thread that cannot be started must not drop the vCPU.
        let slot = Arc::new(Mutex::new(Some(unstarted)));
        let slot_of_thread = slot.clone();
        let live = move || {
            if let Some(unstarted) = take(&slot_of_thread) {
                work(unstarted, &mailbox);
            }
        };
        match sys::BlockedSignals::new().and_then(|_blocked| thread.spawn(live)) {
            Ok(thread) => {
                (self.commands, self.thread) = (Some(commands), Some(thread));
                Ok(())
            }
            Err(error) => {
                self.unstarted = take(&slot);
                Err(ThreadError::Start(error))
            }
        }
    }

    /// Lets the guest run, after `preparation` if there is one, and returns without waiting. The
    /// thread must have been started.
    pub fn resume(&self, preparation: Option<Preparation>) -> Result<(), ThreadError> {
        if let Some(preparation) = preparation {
            self.send(Command::Prepare(preparation))?;
        }
        self.send(Command::Resume)
    }

    /// Asks the thread to park. The caller waits with the returned value, so that all vCPUs can
    /// stop at once.
    pub fn pause(&self) -> Result<Paused, ThreadError> {
        let (done, parked) = mpsc::channel();
        self.send(Command::Pause(done))?;
        self.kick();
        Ok(Paused(parked))
    }

    /// Requests the state of a parked vCPU.
    pub fn save(&self) -> Result<Answer<Box<VcpuStateV1>>, ThreadError> {
        let (answer, reply) = mpsc::channel();
        self.send(Command::Save(answer))?;
        Ok(Answer(reply))
    }

    /// Loads a state into a parked vCPU. The state must come from a vCPU with equal features.
    pub fn load(&self, state: Arc<VcpuStateV1>) -> Result<Answer<()>, ThreadError> {
        let (answer, reply) = mpsc::channel();
        self.send(Command::Load(state, answer))?;
        Ok(Answer(reply))
    }

    /// Requests the time stamp counter of a parked vCPU.
    pub fn mark_clock(&self) -> Result<Answer<ClockMark>, ThreadError> {
        let (answer, reply) = mpsc::channel();
        self.send(Command::MarkClock(answer))?;
        Ok(Answer(reply))
    }

    /// Returns the processor time that the vCPU has used so far.
    pub fn cpu_time(&self) -> Duration {
        self.thread.as_ref().map_or(Duration::ZERO, sys::cpu_time)
    }

    fn send(&self, command: Command) -> Result<(), ThreadError> {
        if let Some(unstarted) = &self.unstarted {
            unstarted.own.obey(command, false);
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

/// A requested pause.
pub struct Paused(Receiver<()>);

impl Paused {
    pub fn wait(self) -> Result<(), ThreadError> {
        receive(&self.0)
    }
}

/// A requested answer of a vCPU.
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
        // A closed call queue means stop; the kick makes the thread look.
        self.commands = None;
        self.kick();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn take(slot: &Mutex<Option<UnstartedVcpu>>) -> Option<UnstartedVcpu> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// The state that the thread owns.
struct OwnedVcpu {
    id: u32,
    vcpu: VcpuFd,
    shape: Arc<StateShape>,
}

impl OwnedVcpu {
    /// Carries out a command while the vCPU does not run. Returns whether the vCPU shall run
    /// afterwards; `running` is whether it ran before.
    fn obey(&self, command: Command, running: bool) -> bool {
        // The requester may have gone, and then needs no answer.
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

fn work(unstarted: UnstartedVcpu, mailbox: &Receiver<Command>) {
    let UnstartedVcpu { mut own, buses, report, entry, .. } = unstarted;
    if let Some(Err(error)) = entry.map(|enter| enter()) {
        log::error!("vCPU {} ends: {error}", own.id);
        return;
    }
    let mut running = false;
    loop {
        // A parked thread sleeps here; a running one only polls for commands.
        let command = if running {
            mailbox.try_recv()
        } else {
            mailbox.recv().map_err(|_| mpsc::TryRecvError::Disconnected)
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
