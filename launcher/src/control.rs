//! What other pvmm commands ask of a VM's process: stand still, go back, hand yourself over.
//!
//! One request, one reply, one connection to `control.sock` in the VM's directory, which only its owner can
//! open. The reply to a freeze comes with the machine's memory and disks as open files.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use pvmm::Template;
use serde::{Deserialize, Serialize};

use crate::commands::balloon::BalloonSize;
use crate::exit::Failure;
use crate::sys::passing;
use crate::vm_dir::{Entry, State};
use crate::vmm_process::copy::HandedOver;

/// The longest line in either direction.
pub const MAX_LINE: usize = 64 << 10;
/// The largest template without its files.
const MAX_TEMPLATE: u64 = 16 << 20;
/// A machine with much changed memory needs time to stand still.
const PATIENCE: Duration = Duration::from_secs(120);

/// One line of JSON to the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Hand over the machine as it is at this instant.
    Freeze,
    /// Remember this instant.
    Checkpoint,
    /// Go back to the checkpoint.
    Rollback,
    Pause,
    Resume,
    /// Ask the guest to give up so much memory.
    SetBalloon {
        target_mib: u64,
    },
    /// How far it is.
    Balloon,
}

/// One line of JSON back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    Done,
    Balloon(BalloonSize),
    /// As many bytes follow, and this line came with files.
    Template {
        bytes: u64,
    },
    Refused {
        code: u8,
        message: String,
        hint: Option<String>,
    },
}

/// Asks for something that has no other answer than that it is done.
pub fn ask(vm: &Entry, request: Request) -> Result<(), Failure> {
    match exchange(vm, request)? {
        (Reply::Done, ..) => Ok(()),
        _ => Err(nonsense(vm)),
    }
}

/// How far the VM's balloon is.
pub fn balloon(vm: &Entry) -> Result<BalloonSize, Failure> {
    match exchange(vm, Request::Balloon)? {
        (Reply::Balloon(size), ..) => Ok(size),
        _ => Err(nonsense(vm)),
    }
}

/// The machine as it is now; it runs on.
pub fn freeze(vm: &Entry) -> Result<Template, Failure> {
    hand_over(vm)?.template()
}

/// The same for another process to make a template of.
pub fn hand_over(vm: &Entry) -> Result<HandedOver, Failure> {
    let (reply, mut socket, mut bytes, files) = exchange(vm, Request::Freeze)?;
    let Reply::Template { bytes: expected } = reply else { return Err(nonsense(vm)) };
    if expected > MAX_TEMPLATE {
        return Err(nonsense(vm));
    }
    let have = bytes.len() as u64;
    let left = expected.saturating_sub(have);
    let read = (&mut socket).take(left).read_to_end(&mut bytes).map_err(|e| broken(vm, &e))?;
    if read as u64 != left {
        return Err(broken(vm, &io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(HandedOver { bytes, files })
}

type Answer = (Reply, UnixStream, Vec<u8>, Vec<OwnedFd>);

fn exchange(vm: &Entry, request: Request) -> Result<Answer, Failure> {
    // A guest that stands still cannot answer its agent; only its process can be asked.
    if !(vm.state == State::Paused && matches!(request, Request::Resume | Request::Pause)) {
        vm.require_running()?;
    }
    let speak = || -> io::Result<Answer> {
        let mut socket = UnixStream::connect(vm.dir.control())?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        let mut line = serde_json::to_vec(&request)?;
        line.push(b'\n');
        socket.write_all(&line)?;
        let (line, rest, files) = passing::receive_line(&socket, MAX_LINE)?;
        Ok((serde_json::from_slice(&line)?, socket, rest, files))
    };
    match speak().map_err(|error| broken(vm, &error))? {
        (Reply::Refused { code, message, hint }, ..) => {
            Err(Failure { hint, ..Failure { code, ..Failure::fault(message) } })
        }
        answer => Ok(answer),
    }
}

fn broken(vm: &Entry, error: &io::Error) -> Failure {
    let why = match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it did not answer".to_owned(),
        io::ErrorKind::UnexpectedEof => "it ended meanwhile".to_owned(),
        _ => error.to_string(),
    };
    Failure::fault(format!("cannot ask the process of '{}': {why}", vm.label()))
}

fn nonsense(vm: &Entry) -> Failure {
    Failure::fault(format!("the process of '{}' answers something else than asked", vm.label()))
}
