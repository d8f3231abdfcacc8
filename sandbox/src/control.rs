//! Control requests from other `pvmm` commands to a monitor process: freeze, checkpoint, rollback,
//! pause, balloon.
//!
//! One request, one reply and one connection to `control.sock` in the VM's directory, which only
//! its owner can open. The reply to a freeze carries the VM's memory and disks as open files.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use pvmm::{Kvm, Template, open};
use pvmm_egress::ConnectionKey;
use pvmm_jailer::group::Group;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, FailureKind};
use crate::net;
use crate::sys::passing;
use crate::vm_dir::{VmEntry, VmStatus};

/// The longest line in either direction.
pub const MAX_LINE: usize = 64 << 10;
/// The largest template without its files.
const MAX_TEMPLATE: u64 = 16 << 20;
/// How long a reply may take: a VM with many dirty pages takes time to freeze.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long the supervisor may take to write a change into the VM's record.
const RECORD_PATIENCE: Duration = Duration::from_secs(10);
const RECORD_PAUSE: Duration = Duration::from_millis(1);

/// A control request, one line of JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlRequest {
    /// Freeze the VM's current state into a template and send that.
    Freeze,
    /// Freeze as above, but leave the workload standing still until a thaw, or for a while.
    FreezeStill,
    /// Let the workload go on after [`Self::FreezeStill`].
    Thaw,
    /// Set when the VM's time to live is over, from now; `None` for never.
    SetTtl {
        ttl_ms: Option<u64>,
    },
    /// Keep the current state as the checkpoint.
    Checkpoint,
    /// Go back to the checkpoint.
    Rollback,
    Pause,
    Resume,
    /// Set how much memory the guest is asked to give back.
    SetBalloon {
        target_mib: u64,
    },
    /// Query the balloon's size.
    Balloon,
}

impl ControlRequest {
    fn copies_memory(self) -> bool {
        matches!(self, Self::Freeze | Self::FreezeStill | Self::Checkpoint)
    }

    /// Whether a VM whose vCPUs are paused can be asked.
    fn needs_no_agent(self) -> bool {
        matches!(self, Self::Resume | Self::Pause | Self::SetTtl { .. })
    }
}

/// The reply to a control request, one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlReply {
    Done,
    Balloon(BalloonSize),
    /// A template of this many bytes follows; its files come with this line.
    Template {
        bytes: u64,
    },
    Refused {
        code: u8,
        message: String,
        hint: Option<String>,
    },
}

/// The balloon's size; the guest's own numbers are not verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BalloonSize {
    pub target_bytes: u64,
    pub actual_bytes: u64,
    pub guest_free_bytes: Option<u64>,
    pub guest_total_bytes: Option<u64>,
}

/// A serialized template and its open files, as one process passes it to another.
#[derive(Debug)]
pub struct HandedOver {
    pub bytes: Vec<u8>,
    pub files: Vec<OwnedFd>,
    /// The connections of the guest through its egress process, which end in every copy.
    pub connections: Vec<ConnectionKey>,
}

/// The note of a template, which a snapshot keeps.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Note {
    connections: Vec<ConnectionKey>,
}

impl HandedOver {
    pub fn of(template: &Template) -> Result<Self, Failure> {
        let handed = template.hand_over().map_err(|error| Failure::fault(format!("{error:#}")))?;
        // The note of a template that other programs made may be anything.
        let note: Note = serde_json::from_slice(template.note()).unwrap_or_default();
        Ok(Self { bytes: handed.0, files: handed.1, connections: note.connections })
    }

    pub fn template(self) -> Result<Template, Failure> {
        let taken = Kvm::open().and_then(|kvm| {
            let mut template = Template::take_over(&kvm, &self.bytes, self.files)?;
            if !self.connections.is_empty() {
                let note = Note { connections: self.connections };
                template.set_note(serde_json::to_vec(&note).unwrap_or_default())?;
            }
            Ok(template)
        });
        taken.map_err(|error| Failure::fault(format!("{error:#}")))
    }
}

/// Sends a request whose only reply is that it is done.
pub fn ask(vm: &VmEntry, request: ControlRequest) -> Result<(), Failure> {
    match exchange(vm, request)? {
        (ControlReply::Done, ..) => Ok(()),
        _ => Err(nonsense(vm)),
    }
}

/// Pauses the VM's vCPUs, or lets them go on. Returns when others see it, too.
pub fn pause(vm: &VmEntry, paused: bool) -> Result<(), Failure> {
    ask(vm, if paused { ControlRequest::Pause } else { ControlRequest::Resume })?;
    // The supervisor, which writes the record, hears of it a moment later than this process.
    let deadline = Instant::now() + RECORD_PATIENCE;
    while vm.dir.read_record().is_some_and(|record| record.paused != paused) {
        if Instant::now() > deadline {
            return Err(Failure::fault(format!("the record of '{}' is not kept", vm.label())));
        }
        std::thread::sleep(RECORD_PAUSE);
    }
    Ok(())
}

/// Queries the size of the VM's balloon.
pub fn balloon(vm: &VmEntry) -> Result<BalloonSize, Failure> {
    match exchange(vm, ControlRequest::Balloon)? {
        (ControlReply::Balloon(size), ..) => Ok(size),
        _ => Err(nonsense(vm)),
    }
}

/// Freezes the VM's current state into a template; the VM keeps running.
pub fn freeze(vm: &VmEntry) -> Result<Template, Failure> {
    hand_over(vm)?.template()
}

/// Freezes the VM's current state and leaves its workload standing still, for a caller that ends
/// the VM next. [`ControlRequest::Thaw`] lets it go on, and so does the end of the connection that
/// is returned with the template.
pub fn freeze_still(vm: &VmEntry) -> Result<(Template, UnixStream), Failure> {
    let (handed_over, connection) = frozen(vm, ControlRequest::FreezeStill)?;
    Ok((handed_over.template()?, connection))
}

/// Sets how long the VM may live from now on.
pub fn set_ttl(vm: &VmEntry, ttl: Option<Duration>) -> Result<(), Failure> {
    // First the supervisor's, which must not end the VM before its monitor does.
    vm.dir.write_ttl(ttl)?;
    ask(vm, ControlRequest::SetTtl { ttl_ms: ttl.map(|ttl| ttl.as_millis() as u64) })
}

/// Freezes the VM's current state, in the form that another process can make a template of.
pub fn hand_over(vm: &VmEntry) -> Result<HandedOver, Failure> {
    frozen(vm, ControlRequest::Freeze).map(|(handed_over, _)| handed_over)
}

fn frozen(vm: &VmEntry, request: ControlRequest) -> Result<(HandedOver, UnixStream), Failure> {
    let mut connections = net::connections(vm);
    let (reply, mut socket, mut bytes, files) = exchange(vm, request)?;
    // Asked twice: one may have been opened or closed just before the guest stood still.
    let more = net::connections(vm);
    connections
        .extend(more.into_iter().filter(|key| !connections.contains(key)).collect::<Vec<_>>());
    let ControlReply::Template { bytes: expected } = reply else { return Err(nonsense(vm)) };
    if expected > MAX_TEMPLATE {
        return Err(nonsense(vm));
    }
    let have = bytes.len() as u64;
    let left = expected.saturating_sub(have);
    let read = (&mut socket).take(left).read_to_end(&mut bytes).map_err(|e| broken(vm, &e))?;
    if read as u64 != left {
        return Err(broken(vm, &io::ErrorKind::UnexpectedEof.into()));
    }
    Ok((HandedOver { bytes, files, connections }, socket))
}

type Answer = (ControlReply, UnixStream, Vec<u8>, Vec<OwnedFd>);

fn exchange(vm: &VmEntry, request: ControlRequest) -> Result<Answer, Failure> {
    // A paused guest's agent cannot answer, but its monitor process can be asked to pause or
    // resume.
    if !(vm.state == VmStatus::Paused && request.needs_no_agent()) {
        vm.require_running()?;
    }
    if request.copies_memory() {
        require_room(vm)?;
    }
    let speak = || -> io::Result<Answer> {
        let mut socket = UnixStream::connect(vm.dir.run().control())?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        let mut line = serde_json::to_vec(&request)?;
        line.push(b'\n');
        socket.write_all(&line)?;
        let (line, rest, files) = passing::receive_line(&socket, MAX_LINE)?;
        // In its jail the process could not open them again: a fork must not be able to write what
        // it shares with the VM.
        let read_only = |file: OwnedFd| open::read_only(&file.into()).map(OwnedFd::from);
        let files = files.into_iter().map(read_only).collect::<io::Result<_>>()?;
        Ok((serde_json::from_slice(&line)?, socket, rest, files))
    };
    match speak().map_err(|error| broken(vm, &error))? {
        (ControlReply::Refused { code, message, hint }, ..) => {
            Err(Failure { hint, ..Failure { code, ..Failure::fault(message) } })
        }
        answer => Ok(answer),
    }
}

/// Refuses what would end the VM: its control group kills it as a whole when a copy of its memory
/// does not fit beside it.
fn require_room(vm: &VmEntry) -> Result<(), Failure> {
    match Group::named(&vm.record.id) {
        Some(group) if !group.has_room_for_a_copy() => {
            let message = format!("there is not memory enough for a copy of '{}'", vm.label());
            Err(Failure::fault(message)
                .of_kind(FailureKind::NoMemory)
                .hint("its control group limits it; end it, or raise memory.max of the group"))
        }
        _ => Ok(()),
    }
}

fn broken(vm: &VmEntry, error: &io::Error) -> Failure {
    let why = match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it did not answer".to_owned(),
        io::ErrorKind::UnexpectedEof => "it ended meanwhile".to_owned(),
        _ => error.to_string(),
    };
    Failure::fault(format!("cannot ask the process of '{}': {why}", vm.label()))
}

fn nonsense(vm: &VmEntry) -> Failure {
    Failure::fault(format!("the process of '{}' answers something else than asked", vm.label()))
}
