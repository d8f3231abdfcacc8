//! Control requests from other `pvmm` commands to a monitor process: freeze, checkpoint, checkout,
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

use crate::checkpoint_tree::Checkpoint;
use crate::failure::{Failure, FailureKind};
use crate::guest_agent;
use crate::kernel_file::KernelFile;
use crate::net;
use crate::sys::passing;
use crate::vm_dir::{VmEntry, VmStatus};

/// The longest line in either direction.
pub const MAX_LINE: usize = 64 << 10;
/// The largest template without its files.
const MAX_TEMPLATE: u64 = 16 << 20;
/// How long a reply may take: a VM with many dirty pages takes time to freeze.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long a guest may take to flush its disks while its workload runs.
const SYNC_PATIENCE: Duration = Duration::from_secs(60);

/// How long the supervisor may take to write a change into the VM's record.
const RECORD_PATIENCE: Duration = Duration::from_secs(10);
const RECORD_PAUSE: Duration = Duration::from_millis(1);

/// The most connections that are kept with a checkpoint, so that their list fits into a line.
const MAX_CONNECTIONS: usize = 500;

/// A control request, one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlRequest {
    /// Freeze the VM's current state into a template and send that.
    Freeze,
    /// Freeze as above, but leave the workload standing still until a thaw, or for a while.
    FreezeStill,
    /// Flush the guest's file systems, freeze the VM's disks alone and send them.
    FreezeDisks,
    /// Let the workload go on after [`Self::FreezeStill`].
    Thaw,
    /// Set when the VM's time to live is over, from now; `None` for never.
    SetTtl {
        ttl_ms: Option<u64>,
    },
    /// Keep the current state as a checkpoint, of this name or numbered.
    Checkpoint {
        name: Option<String>,
        /// The connections of the guest, which end in forks of the checkpoint.
        connections: Vec<ConnectionKey>,
    },
    /// List the checkpoints.
    Checkpoints,
    /// Go to a checkpoint.
    Checkout {
        name: String,
    },
    /// Go back to the current checkpoint.
    Rollback,
    DeleteCheckpoint {
        name: String,
    },
    /// Send the template of a checkpoint.
    HandOver {
        checkpoint: String,
    },
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
    fn copies_memory(&self) -> bool {
        matches!(self, Self::Freeze | Self::FreezeStill | Self::Checkpoint { .. })
    }

    /// Whether a VM whose vCPUs are paused can be asked.
    fn needs_no_agent(&self) -> bool {
        matches!(
            self,
            Self::Resume
                | Self::Pause
                | Self::SetTtl { .. }
                | Self::Checkpoints
                | Self::DeleteCheckpoint { .. }
                | Self::HandOver { .. }
        )
    }
}

/// The reply to a control request, one line of JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlReply {
    Done,
    Balloon(BalloonSize),
    Checkpoint(Checkpoint),
    Checkpoints(Vec<Checkpoint>),
    /// A template of this many bytes follows; its files come with this line.
    Template {
        bytes: u64,
        /// The connections of the guest when a checkpoint was taken.
        connections: Vec<ConnectionKey>,
    },
    Refused {
        code: u8,
        kind: Option<FailureKind>,
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
    pub note: Note,
}

/// The note of a template, which a snapshot keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Note {
    /// The connections of the guest through its egress process, which end in every copy.
    pub connections: Vec<ConnectionKey>,
    /// The name of the guest's kernel, and its file.
    pub kernel: String,
    pub kernel_file: Option<KernelFile>,
}

impl Note {
    /// Reads a note. That of a snapshot which other programs made may be anything.
    pub fn read(bytes: &[u8]) -> Self {
        serde_json::from_slice(bytes).unwrap_or_default()
    }

    /// Returns the note of a VM with these connections.
    fn of(vm: &VmEntry, connections: Vec<ConnectionKey>) -> Self {
        let (kernel, kernel_file) = (vm.record.kernel.clone(), vm.record.kernel_file.clone());
        Self { connections, kernel, kernel_file }
    }
}

impl HandedOver {
    pub fn of(template: &Template) -> Result<Self, Failure> {
        let handed = template.hand_over().map_err(|error| Failure::fault(format!("{error:#}")))?;
        Ok(Self { bytes: handed.0, files: handed.1, note: Note::read(template.note()) })
    }

    pub fn template(self) -> Result<Template, Failure> {
        let taken = Kvm::open().and_then(|kvm| {
            let mut template = Template::take_over(&kvm, &self.bytes, self.files)?;
            if self.note != Note::default() {
                template.set_note(serde_json::to_vec(&self.note).unwrap_or_default())?;
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

/// Keeps the VM's current state as a checkpoint, of this name or numbered.
pub fn checkpoint(vm: &VmEntry, name: Option<&str>) -> Result<Checkpoint, Failure> {
    let mut connections = net::connections(vm);
    connections.truncate(MAX_CONNECTIONS);
    let name = name.map(str::to_owned);
    match exchange(vm, ControlRequest::Checkpoint { name, connections })? {
        (ControlReply::Checkpoint(checkpoint), ..) => Ok(checkpoint),
        _ => Err(nonsense(vm)),
    }
}

/// Lists the checkpoints of the VM, oldest first.
pub fn checkpoints(vm: &VmEntry) -> Result<Vec<Checkpoint>, Failure> {
    match exchange(vm, ControlRequest::Checkpoints)? {
        (ControlReply::Checkpoints(all), ..) => Ok(all),
        _ => Err(nonsense(vm)),
    }
}

/// Takes the VM to a checkpoint; without a name, back to the one that it stands on.
pub fn checkout(vm: &VmEntry, name: Option<&str>) -> Result<(), Failure> {
    let to = name.map(|name| ControlRequest::Checkout { name: name.to_owned() });
    ask(vm, to.unwrap_or(ControlRequest::Rollback))
}

/// Deletes a checkpoint; the VM and its other checkpoints stay as they are.
pub fn delete_checkpoint(vm: &VmEntry, name: &str) -> Result<(), Failure> {
    ask(vm, ControlRequest::DeleteCheckpoint { name: name.to_owned() })
}

/// Freezes the VM's current state into a template; the VM keeps running.
pub fn freeze(vm: &VmEntry) -> Result<Template, Failure> {
    hand_over(vm)?.template()
}

/// Freezes the VM's disks alone, with all that its guest has written, into a template without
/// memory; the VM keeps running.
pub fn freeze_disks(vm: &VmEntry) -> Result<Template, Failure> {
    if !vm.record.volumes.is_empty() {
        let message =
            format!("'{}' has volumes, which a snapshot of disks alone cannot hold", vm.label());
        return Err(Failure::usage(message)
            .hint("copy a volume with: pvmm volume cp; or write a snapshot with memory"));
    }
    if vm.record.kernel_file.is_none() {
        let message = format!(
            "the kernel of '{}' is not known, and nothing could boot its disks",
            vm.label()
        );
        return Err(Failure::usage(message).hint("write a snapshot with memory"));
    }
    vm.require_running()?;
    // The workload runs on meanwhile, and stands still only for what it writes after this. A guest
    // without the program does all of it then.
    if let Err(error) = guest_agent::sync(&vm.dir.run().vsock(), SYNC_PATIENCE) {
        log::info!("the guest's disks are flushed later: {error}");
    }
    let answer = exchange(vm, ControlRequest::FreezeDisks)?;
    let (mut handed_over, _) = received(vm, answer)?;
    handed_over.note = Note::of(vm, Vec::new());
    handed_over.template()
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

/// Returns the state of a checkpoint, or the current state without one, in the form that another
/// process can make a template of. The VM itself stays where it is.
pub fn hand_over_at(vm: &VmEntry, checkpoint: Option<&str>) -> Result<HandedOver, Failure> {
    let Some(name) = checkpoint else { return hand_over(vm) };
    let answer = exchange(vm, ControlRequest::HandOver { checkpoint: name.to_owned() })?;
    received(vm, answer).map(|(handed_over, _)| handed_over)
}

fn frozen(vm: &VmEntry, request: ControlRequest) -> Result<(HandedOver, UnixStream), Failure> {
    let mut connections = net::connections(vm);
    let answer = exchange(vm, request)?;
    // Asked twice: one may have been opened or closed just before the guest stood still.
    let more = net::connections(vm);
    connections
        .extend(more.into_iter().filter(|key| !connections.contains(key)).collect::<Vec<_>>());
    let (mut handed_over, socket) = received(vm, answer)?;
    handed_over.note = Note::of(vm, connections);
    Ok((handed_over, socket))
}

/// Reads the rest of a template.
fn received(vm: &VmEntry, answer: Answer) -> Result<(HandedOver, UnixStream), Failure> {
    let (reply, mut socket, mut bytes, files) = answer;
    let ControlReply::Template { bytes: expected, connections } = reply else {
        return Err(nonsense(vm));
    };
    if expected > MAX_TEMPLATE {
        return Err(nonsense(vm));
    }
    let have = bytes.len() as u64;
    let left = expected.saturating_sub(have);
    let read = (&mut socket).take(left).read_to_end(&mut bytes).map_err(|e| broken(vm, &e))?;
    if read as u64 != left {
        return Err(broken(vm, &io::ErrorKind::UnexpectedEof.into()));
    }
    let note = Note { connections, ..Note::default() };
    Ok((HandedOver { bytes, files, note }, socket))
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
        (ControlReply::Refused { code, kind, message, hint }, ..) => {
            Err(Failure { code, special: kind, hint, ..Failure::fault(message) })
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
