//! The VMM process's end of the control socket: one request at a time, on the thread that owns the machine.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, FreezeOptions, Refresh};
use pvmm::{Error, ErrorKind, Vm};

use crate::commands::balloon::BalloonSize;
use crate::control::{MAX_LINE, Reply, Request};
use crate::exit::{FAULT, USAGE};
use crate::sys::passing;

/// How long a client may take to say what it wants, and to take the answer.
const CLIENT_PATIENCE: Duration = Duration::from_secs(5);
/// How long the guest's agent may take to stop its workload, and to let it go on.
const AGENT_PATIENCE: Duration = Duration::from_secs(20);

/// How long the guest may take to say how its memory is.
const BALLOON_PATIENCE: Duration = Duration::from_secs(5);

/// Where requests arrive.
pub struct Control {
    listener: UnixListener,
    /// Counts the lives of this machine, for its guest to see.
    generation: u64,
}

/// What a request has done to the machine, for those who watch it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    None,
    Paused(bool),
    /// Whatever was connected to the guest is not any more.
    RolledBack,
}

impl Control {
    pub fn bind(path: &Path) -> io::Result<Self> {
        let listener = pvmm::listen_privately(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, generation: 1 })
    }

    /// Takes one client and does what it asks. What goes wrong with it is its own affair.
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
        match self.perform(request, vm) {
            Ok((effect, Told::Nothing)) => {
                reply(&client, &Reply::Done, &[])?;
                Ok(effect)
            }
            Ok((effect, Told::Balloon(size))) => {
                reply(&client, &Reply::Balloon(size), &[])?;
                Ok(effect)
            }
            Ok((effect, Told::Template(bytes, files))) => {
                reply(&client, &Reply::Template { bytes: bytes.len() as u64 }, &files)?;
                (&client).write_all(&bytes)?;
                Ok(effect)
            }
            Err(error) => {
                let code = if error.kind() == ErrorKind::InvalidConfig { USAGE } else { FAULT };
                let hint = hint_for(request).filter(|_| code == USAGE).map(str::to_owned);
                let refused = Reply::Refused { code, message: error.to_string(), hint };
                reply(&client, &refused, &[])?;
                Ok(Effect::None)
            }
        }
    }

    fn perform(&mut self, request: Request, vm: &mut Vm) -> Result<(Effect, Told), Error> {
        match request {
            Request::Freeze => {
                // Before the workload is stopped: that takes as long as the drives are large.
                vm.prepare_freeze()?;
                let template =
                    standing_still(vm, FreezeOptions::default(), Vm::begin_freeze)?.finish()?;
                let (bytes, files) = template.hand_over()?;
                Ok((Effect::None, Told::Template(bytes, files)))
            }
            Request::Checkpoint => {
                // Nobody but the machine itself goes on from here, so it may know its secrets.
                let options = FreezeOptions { keep_secrets: true, ..FreezeOptions::default() };
                standing_still(vm, options, Vm::checkpoint)?;
                Ok((Effect::None, Told::Nothing))
            }
            Request::Rollback => {
                vm.rollback()?;
                self.generation += 1;
                // The same computer, only earlier: its names stay, its clock and its dice do not.
                let refresh = Refresh::new(self.generation)?.without_ids();
                refreshed(vm, &refresh, Instant::now() + AGENT_PATIENCE)?;
                Ok((Effect::RolledBack, Told::Nothing))
            }
            Request::Pause => {
                vm.pause()?;
                Ok((Effect::Paused(true), Told::Nothing))
            }
            Request::Resume => {
                vm.resume()?;
                Ok((Effect::Paused(false), Told::Nothing))
            }
            Request::SetBalloon { target_mib } => {
                vm.set_balloon(target_mib)?;
                Ok((Effect::None, Told::Nothing))
            }
            Request::Balloon => {
                let stats = vm.balloon_stats(BALLOON_PATIENCE)?;
                let size = BalloonSize {
                    target_bytes: stats.target_bytes,
                    actual_bytes: stats.actual_bytes,
                    guest_free_bytes: stats.free,
                    guest_total_bytes: stats.total,
                };
                Ok((Effect::None, Told::Balloon(size)))
            }
        }
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// What a client is told beside that it is done.
enum Told {
    Nothing,
    Balloon(BalloonSize),
    /// The machine, and its open files.
    Template(Vec<u8>, Vec<OwnedFd>),
}

/// Makes a machine that lives a second time its own, and lets its workload go on.
pub fn refreshed(vm: &Vm, refresh: &Refresh, deadline: Instant) -> Result<Agent, Error> {
    let Some(path) = vm.vsock_path() else {
        return Err(Error::plain(ErrorKind::InvalidConfig, "the VM has no vsock device"));
    };
    Ok(Agent::connect_refreshed(path, &refresh.clone().clock_of(vm), deadline)?)
}

/// Does something while the guest's workload stands still, so that a copy of it is refreshed before any of
/// its processes runs an instruction.
fn standing_still<T>(
    vm: &mut Vm,
    options: FreezeOptions,
    act: impl FnOnce(&mut Vm) -> Result<T, Error>,
) -> Result<T, Error> {
    let deadline = Instant::now() + AGENT_PATIENCE;
    let Some(path) = vm.vsock_path() else {
        return Err(Error::plain(ErrorKind::InvalidConfig, "the VM has no vsock device"));
    };
    let agent = Agent::connect_control(path, deadline)?;
    agent.freeze_with(options, deadline)?;
    let done = act(vm);
    // The machine of before goes on in any case; only its copies wait for their refresh. With a deadline of its own: the
    // first one may be used up by now.
    agent.thaw(Instant::now() + AGENT_PATIENCE)?;
    done
}

/// What to try when the machine is not made for a request.
fn hint_for(request: Request) -> Option<&'static str> {
    match request {
        Request::Balloon => Some("a VM has one if it was started with: pvmm run --balloon"),
        _ => None,
    }
}

fn read_request(mut client: &UnixStream) -> io::Result<Request> {
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

fn reply(mut client: &UnixStream, reply: &Reply, files: &[OwnedFd]) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    let sent = passing::send(client, &line, files)?;
    client.write_all(&line[sent..])
}
