//! The monitor process's side of the control socket: one request at a time, on the thread that owns
//! the VM.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, AgentError, FreezeOptions, Refresh};
use pvmm::{Adoption, Error, ErrorKind, Template, Vm};
use pvmm_egress::ConnectionKey;

use crate::checkpoint_tree::{Checkpoint, CheckpointTree, TreeError};
use crate::control::BalloonSize;
use crate::control::{ControlReply, ControlRequest, MAX_LINE};
use crate::failure::{FAULT, FailureKind, USAGE};
use crate::machine::SETTLE_MAX;
use crate::sys::passing;
use crate::vm_dir::now_ms;

/// How long a client may take to send its request, and to read the answer.
const CLIENT_PATIENCE: Duration = Duration::from_secs(5);
/// How long the agent may take to freeze the workload, and to thaw it.
const AGENT_PATIENCE: Duration = Duration::from_secs(20);

/// How long the guest may take to report its memory statistics.
const BALLOON_PATIENCE: Duration = Duration::from_secs(5);

/// The listening control socket.
pub struct Control {
    listener: UnixListener,
    /// 1 plus the number of rollbacks; the guest gets it with each refresh.
    generation: u64,
    checkpoints: CheckpointTree<Kept>,
}

/// The content of a checkpoint.
struct Kept {
    template: Template,
    /// The connections of the guest through its egress process.
    connections: Vec<ConnectionKey>,
    /// Whether a secret was delivered to the guest, which must not get into forks.
    has_secrets: bool,
}

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("{0:#}")]
    Vm(#[from] Error),
    #[error(transparent)]
    Tree(#[from] TreeError),
}

impl Refusal {
    /// Returns the exit code, and the kind where the code says too little.
    fn code(&self) -> (u8, Option<FailureKind>) {
        match self {
            Self::Vm(error) if error.kind() != ErrorKind::InvalidConfig => (FAULT, None),
            Self::Vm(_) | Self::Tree(TreeError::BadName) => (USAGE, None),
            Self::Tree(TreeError::Unknown(_)) => (USAGE, Some(FailureKind::NotFound)),
            Self::Tree(_) => (USAGE, Some(FailureKind::Conflict)),
        }
    }
}

/// How a request has changed the VM, for the event loop.
pub enum Effect {
    None,
    /// A template was made, whose memory the VM can share.
    Frozen(Adoption),
    Paused(bool),
    /// All connections to the guest are broken.
    RolledBack,
    /// The workload stands still until a thaw, or until the client is gone.
    Still(Option<UnixStream>),
    Thawed,
    /// The VM may live this long from now on.
    Ttl(Option<Duration>),
}

impl Control {
    pub fn bind(path: &Path) -> io::Result<Self> {
        let listener = pvmm::listen_privately(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, generation: 1, checkpoints: CheckpointTree::default() })
    }

    /// Serves one client. An error of that client is logged and affects nothing else.
    pub fn serve(&mut self, vm: &mut Vm) -> Effect {
        let served = self.listener.accept().and_then(|(client, _)| self.answer(client, vm));
        served.unwrap_or_else(|error| {
            if error.kind() != io::ErrorKind::WouldBlock {
                log::warn!("control: {error}");
            }
            Effect::None
        })
    }

    fn answer(&mut self, client: UnixStream, vm: &mut Vm) -> io::Result<Effect> {
        client.set_nonblocking(false)?;
        client.set_read_timeout(Some(CLIENT_PATIENCE))?;
        client.set_write_timeout(Some(CLIENT_PATIENCE))?;
        let request = read_request(&client)?;
        let hint = hint_for(&request);
        let (effect, answered) = match self.perform(request, vm) {
            Ok((effect, Done::Nothing)) => (effect, reply(&client, &ControlReply::Done, &[])),
            Ok((effect, Done::Balloon(size))) => {
                (effect, reply(&client, &ControlReply::Balloon(size), &[]))
            }
            Ok((effect, Done::Checkpoint(one))) => {
                (effect, reply(&client, &ControlReply::Checkpoint(one), &[]))
            }
            Ok((effect, Done::Checkpoints(all))) => {
                (effect, reply(&client, &ControlReply::Checkpoints(all), &[]))
            }
            Ok((effect, Done::Template((bytes, files), connections))) => {
                let template = ControlReply::Template { bytes: bytes.len() as u64, connections };
                let sent = reply(&client, &template, &files);
                (effect, sent.and_then(|()| (&client).write_all(&bytes)))
            }
            Err(refusal) => {
                let (code, kind) = refusal.code();
                let hint = hint.filter(|_| code == USAGE).map(str::to_owned);
                let message = refusal.to_string();
                let refused = ControlReply::Refused { code, kind, message, hint };
                (Effect::None, reply(&client, &refused, &[]))
            }
        };
        // The VM has changed, also if the client does not learn of it.
        if let Err(error) = answered {
            log::warn!("control: {error}");
        }
        Ok(match effect {
            Effect::Still(_) => Effect::Still(Some(client)),
            other => other,
        })
    }

    fn perform(&mut self, request: ControlRequest, vm: &mut Vm) -> Result<(Effect, Done), Refusal> {
        match request {
            ControlRequest::Freeze => {
                // Called before the workload is frozen: it takes time in proportion to the size of
                // the drives.
                vm.prepare_freeze()?;
                let (begun, _) = standing_still(vm, FreezeOptions::default(), Vm::begin_freeze)?;
                let template = begun.finish()?;
                let done = Done::Template(template.hand_over()?, Vec::new());
                Ok((Effect::Frozen(template.adoption()), done))
            }
            ControlRequest::FreezeStill => {
                vm.prepare_freeze()?;
                let template = held_still(vm, FreezeOptions::default(), Vm::begin_freeze)?;
                let handed = template.finish().and_then(|template| template.hand_over());
                match handed {
                    Ok(handed) => Ok((Effect::Still(None), Done::Template(handed, Vec::new()))),
                    Err(error) => Ok(thaw(vm).and(Err(error))?),
                }
            }
            ControlRequest::FreezeDisks => {
                vm.prepare_freeze()?;
                let options = FreezeOptions { sync: true, ..FreezeOptions::default() };
                let (template, _) = standing_still(vm, options, Vm::freeze_disks)?;
                Ok((Effect::None, Done::Template(template.hand_over()?, Vec::new())))
            }
            ControlRequest::Thaw => {
                thaw(vm)?;
                Ok((Effect::Thawed, Done::Nothing))
            }
            ControlRequest::SetTtl { ttl_ms } => {
                Ok((Effect::Ttl(ttl_ms.map(Duration::from_millis)), Done::Nothing))
            }
            ControlRequest::Checkpoint { name, connections } => {
                let one = self.checkpoint(vm, name.as_deref(), connections)?;
                Ok((Effect::None, Done::Checkpoint(one)))
            }
            ControlRequest::Checkpoints => {
                Ok((Effect::None, Done::Checkpoints(self.checkpoints.list())))
            }
            ControlRequest::Checkout { name } => self.checkout(vm, &name),
            ControlRequest::Rollback => {
                let name = self.checkpoints.current()?.to_owned();
                self.checkout(vm, &name)
            }
            ControlRequest::DeleteCheckpoint { name } => {
                self.checkpoints.remove(&name)?;
                Ok((Effect::None, Done::Nothing))
            }
            ControlRequest::HandOver { checkpoint } => {
                let kept = self.checkpoints.get(&checkpoint)?;
                if kept.has_secrets {
                    return Err(Error::from(AgentError::HoldsSecrets).into());
                }
                let handed = kept.template.hand_over()?;
                Ok((Effect::None, Done::Template(handed, kept.connections.clone())))
            }
            ControlRequest::Pause => {
                vm.pause()?;
                Ok((Effect::Paused(true), Done::Nothing))
            }
            ControlRequest::Resume => {
                vm.resume()?;
                Ok((Effect::Paused(false), Done::Nothing))
            }
            ControlRequest::SetBalloon { target_mib } => {
                vm.set_balloon(target_mib)?;
                Ok((Effect::None, Done::Nothing))
            }
            ControlRequest::Balloon => {
                let stats = vm.balloon_stats(BALLOON_PATIENCE)?;
                let size = BalloonSize {
                    target_bytes: stats.target_bytes,
                    actual_bytes: stats.actual_bytes,
                    guest_free_bytes: stats.free,
                    guest_total_bytes: stats.total,
                };
                Ok((Effect::None, Done::Balloon(size)))
            }
        }
    }

    fn checkpoint(
        &mut self,
        vm: &mut Vm,
        wanted: Option<&str>,
        connections: Vec<ConnectionKey>,
    ) -> Result<Checkpoint, Refusal> {
        let name = self.checkpoints.name_next(wanted)?;
        // This VM itself may continue from the checkpoint with its secrets; forks of it may not.
        let options = FreezeOptions { keep_secrets: true, ..FreezeOptions::default() };
        let (template, has_secrets) = standing_still(vm, options, Vm::take_checkpoint)?;
        let kept = Kept { template, connections, has_secrets };
        Ok(self.checkpoints.add(name, wanted.is_none(), now_ms(), kept))
    }

    fn checkout(&mut self, vm: &mut Vm, name: &str) -> Result<(Effect, Done), Refusal> {
        vm.checkout(&self.checkpoints.get(name)?.template)?;
        self.checkpoints.go_to(name)?;
        self.generation += 1;
        // After a checkout the identity stays; the clock and random numbers must be new.
        let refresh = Refresh::new(self.generation).map_err(Error::from)?.without_ids();
        refreshed(vm, &refresh, Instant::now() + AGENT_PATIENCE)?;
        Ok((Effect::RolledBack, Done::Nothing))
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// The data that an answer carries.
enum Done {
    Nothing,
    Balloon(BalloonSize),
    Checkpoint(Checkpoint),
    Checkpoints(Vec<Checkpoint>),
    /// The template, serialized, and its open files; and the connections of a checkpoint.
    Template((Vec<u8>, Vec<OwnedFd>), Vec<ConnectionKey>),
}

/// Refreshes a forked or restored VM through its agent, which then lets the workload continue.
pub fn refreshed(vm: &Vm, refresh: &Refresh, deadline: Instant) -> Result<Agent, Error> {
    let Some(path) = vm.vsock_path() else {
        return Err(Error::plain(ErrorKind::InvalidConfig, "the VM has no vsock device"));
    };
    Ok(Agent::connect_refreshed(path, &refresh.clone().clock_of(vm), deadline)?)
}

/// Calls `act` while the agent holds the workload frozen, so that a fork made from that state is
/// refreshed before any of its processes runs an instruction. Returns the result, and whether the
/// guest holds secrets.
fn standing_still<T>(
    vm: &mut Vm,
    options: FreezeOptions,
    act: impl FnOnce(&mut Vm) -> Result<T, Error>,
) -> Result<(T, bool), Error> {
    let (agent, has_secrets) = freeze_workload(vm, options)?;
    vm.settle(SETTLE_MAX);
    let done = act(vm);
    // The original VM continues in any case; only its forks wait for a refresh. The thaw has its
    // own deadline, because the first may be used up by now.
    agent.thaw(Instant::now() + AGENT_PATIENCE)?;
    Ok((done?, has_secrets))
}

/// Calls `act` as [`standing_still`] does, but lets the workload go on only if `act` fails.
fn held_still<T>(
    vm: &mut Vm,
    options: FreezeOptions,
    act: impl FnOnce(&mut Vm) -> Result<T, Error>,
) -> Result<T, Error> {
    let (agent, _) = freeze_workload(vm, options)?;
    vm.settle(SETTLE_MAX);
    match act(vm) {
        Ok(done) => Ok(done),
        Err(error) => {
            agent.thaw(Instant::now() + AGENT_PATIENCE)?;
            Err(error)
        }
    }
}

/// Freezes the workload. Returns the agent, and whether the guest holds secrets.
fn freeze_workload(vm: &Vm, options: FreezeOptions) -> Result<(Agent, bool), Error> {
    let deadline = Instant::now() + AGENT_PATIENCE;
    let agent = control_agent(vm, deadline)?;
    let frozen = agent.freeze_with(options, deadline)?;
    Ok((agent, frozen.secrets))
}

/// Lets the workload go on.
pub fn thaw(vm: &Vm) -> Result<(), Error> {
    let deadline = Instant::now() + AGENT_PATIENCE;
    Ok(control_agent(vm, deadline)?.thaw(deadline)?)
}

fn control_agent(vm: &Vm, deadline: Instant) -> Result<Agent, Error> {
    let Some(path) = vm.vsock_path() else {
        return Err(Error::plain(ErrorKind::InvalidConfig, "the VM has no vsock device"));
    };
    Ok(Agent::connect_control(path, deadline)?)
}

/// Returns what to try when the VM lacks what a request needs.
fn hint_for(request: &ControlRequest) -> Option<&'static str> {
    match request {
        ControlRequest::Balloon => Some("a VM has one if it was started with: pvmm run --balloon"),
        ControlRequest::Checkout { .. }
        | ControlRequest::DeleteCheckpoint { .. }
        | ControlRequest::HandOver { .. } => Some("the log of the VM lists its checkpoints"),
        _ => None,
    }
}

fn read_request(mut client: &UnixStream) -> io::Result<ControlRequest> {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() < MAX_LINE {
        client.read_exact(&mut byte)?;
        if byte[0] == b'\n' {
            return Ok(serde_json::from_slice(&line)?);
        }
        line.push(byte[0]);
    }
    Err(io::ErrorKind::InvalidData.into())
}

fn reply(mut client: &UnixStream, reply: &ControlReply, files: &[OwnedFd]) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    let sent = passing::send(client, &line, files)?;
    client.write_all(&line[sent..])
}
