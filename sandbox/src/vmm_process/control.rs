//! The monitor process's side of the control socket: one request at a time, on the thread that owns
//! the VM.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, FreezeOptions, Refresh};
use pvmm::{Adoption, Error, ErrorKind, Vm};

use crate::control::BalloonSize;
use crate::control::{ControlReply, ControlRequest, MAX_LINE};
use crate::failure::{FAULT, USAGE};
use crate::machine::SETTLE_MAX;
use crate::sys::passing;

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
        Ok(Self { listener, generation: 1 })
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
        let (effect, answered) = match self.perform(request, vm) {
            Ok((effect, Done::Nothing)) => (effect, reply(&client, &ControlReply::Done, &[])),
            Ok((effect, Done::Balloon(size))) => {
                (effect, reply(&client, &ControlReply::Balloon(size), &[]))
            }
            Ok((effect, Done::Template(bytes, files))) => {
                let template = ControlReply::Template { bytes: bytes.len() as u64 };
                let sent = reply(&client, &template, &files);
                (effect, sent.and_then(|()| (&client).write_all(&bytes)))
            }
            Err(error) => {
                let code = if error.kind() == ErrorKind::InvalidConfig { USAGE } else { FAULT };
                let hint = hint_for(request).filter(|_| code == USAGE).map(str::to_owned);
                let refused = ControlReply::Refused { code, message: format!("{error:#}"), hint };
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

    fn perform(&mut self, request: ControlRequest, vm: &mut Vm) -> Result<(Effect, Done), Error> {
        match request {
            ControlRequest::Freeze => {
                // Called before the workload is frozen: it takes time in proportion to the size of
                // the drives.
                vm.prepare_freeze()?;
                let template =
                    standing_still(vm, FreezeOptions::default(), Vm::begin_freeze)?.finish()?;
                let (bytes, files) = template.hand_over()?;
                Ok((Effect::Frozen(template.adoption()), Done::Template(bytes, files)))
            }
            ControlRequest::FreezeStill => {
                vm.prepare_freeze()?;
                let template = held_still(vm, FreezeOptions::default(), Vm::begin_freeze)?;
                let handed = template.finish().and_then(|template| template.hand_over());
                match handed {
                    Ok((bytes, files)) => Ok((Effect::Still(None), Done::Template(bytes, files))),
                    Err(error) => thaw(vm).and(Err(error)),
                }
            }
            ControlRequest::Thaw => {
                thaw(vm)?;
                Ok((Effect::Thawed, Done::Nothing))
            }
            ControlRequest::SetTtl { ttl_ms } => {
                Ok((Effect::Ttl(ttl_ms.map(Duration::from_millis)), Done::Nothing))
            }
            ControlRequest::Checkpoint => {
                // Only this VM itself continues from the checkpoint, so it may keep its secrets.
                let options = FreezeOptions { keep_secrets: true, ..FreezeOptions::default() };
                standing_still(vm, options, Vm::checkpoint)?;
                Ok((Effect::None, Done::Nothing))
            }
            ControlRequest::Rollback => {
                vm.rollback()?;
                self.generation += 1;
                // After a rollback the identity stays; the clock and random numbers must be new.
                let refresh = Refresh::new(self.generation)?.without_ids();
                refreshed(vm, &refresh, Instant::now() + AGENT_PATIENCE)?;
                Ok((Effect::RolledBack, Done::Nothing))
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
    /// The template, serialized, and its open files.
    Template(Vec<u8>, Vec<OwnedFd>),
}

/// Refreshes a forked or restored VM through its agent, which then lets the workload continue.
pub fn refreshed(vm: &Vm, refresh: &Refresh, deadline: Instant) -> Result<Agent, Error> {
    let Some(path) = vm.vsock_path() else {
        return Err(Error::plain(ErrorKind::InvalidConfig, "the VM has no vsock device"));
    };
    Ok(Agent::connect_refreshed(path, &refresh.clone().clock_of(vm), deadline)?)
}

/// Calls `act` while the agent holds the workload frozen, so that a fork made from that state is
/// refreshed before any of its processes runs an instruction.
fn standing_still<T>(
    vm: &mut Vm,
    options: FreezeOptions,
    act: impl FnOnce(&mut Vm) -> Result<T, Error>,
) -> Result<T, Error> {
    let agent = freeze_workload(vm, options)?;
    vm.settle(SETTLE_MAX);
    let done = act(vm);
    // The original VM continues in any case; only its forks wait for a refresh. The thaw has its
    // own deadline, because the first may be used up by now.
    agent.thaw(Instant::now() + AGENT_PATIENCE)?;
    done
}

/// Calls `act` as [`standing_still`] does, but lets the workload go on only if `act` fails.
fn held_still<T>(
    vm: &mut Vm,
    options: FreezeOptions,
    act: impl FnOnce(&mut Vm) -> Result<T, Error>,
) -> Result<T, Error> {
    let agent = freeze_workload(vm, options)?;
    vm.settle(SETTLE_MAX);
    match act(vm) {
        Ok(done) => Ok(done),
        Err(error) => {
            agent.thaw(Instant::now() + AGENT_PATIENCE)?;
            Err(error)
        }
    }
}

fn freeze_workload(vm: &Vm, options: FreezeOptions) -> Result<Agent, Error> {
    let deadline = Instant::now() + AGENT_PATIENCE;
    let agent = control_agent(vm, deadline)?;
    agent.freeze_with(options, deadline)?;
    Ok(agent)
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
fn hint_for(request: ControlRequest) -> Option<&'static str> {
    match request {
        ControlRequest::Balloon => Some("a VM has one if it was started with: pvmm run --balloon"),
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
