//! The processes of a fork: this program executed again, with its order and open files sent
//! over a socket.
//!
//! All forks of one VM come from one launcher. A plain fork(2) would give every monitor process the
//! launcher's address space layout and stack canary, so that leaking those of one process reveals
//! them for all; an exec gives each its own.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pvmm_egress::secrets::Placeholders;
use serde::{Deserialize, Serialize};

use super::{Mode, Plan, Reporter, Start, VmmProcess, supervisor};
use crate::control::{HandedOver, Note};
use crate::disk_snapshot::{BootOrder, DiskSnapshot};
use crate::failure::{self, Failure};
use crate::machine::Extras;
use crate::overrides::CopyFlags;
use crate::sys::process::Child;
use crate::sys::{passing, poll, process};
use crate::vm_dir::{Claim, Record};

/// The name of the process; [`super::begin`] recognizes it by this.
pub(super) const NAME: &str = "pvmm-vmm";

/// The longest order without the template, and the largest template without its files.
const MAX_ORDERS: usize = 1 << 20;
const MAX_TEMPLATE: u64 = 16 << 20;
/// How long the process may take to read its order, and the launcher to send it.
const PATIENCE: Duration = Duration::from_secs(60);

/// The state that a VM begins with.
#[derive(Clone, Copy)]
pub enum CopySource<'a> {
    /// A frozen VM.
    Template(&'a HandedOver),
    /// Disks that the VM is booted with.
    Disks(&'a DiskSnapshot),
}

/// The VM that a new monitor process is to make.
pub struct Order<'a> {
    pub machine: CopySource<'a>,
    pub record: Record,
    pub flags: &'a CopyFlags,
    /// The fork's number, if several are made at once.
    pub number: Option<u32>,
    pub makes_taps: bool,
    pub boot_patience: Duration,
    pub jailed: bool,
    pub ttl: Option<Duration>,
    /// Whether its workload is left standing still.
    pub still: bool,
    /// The placeholders of secrets that the guest is told.
    pub placeholders: Option<&'a Placeholders>,
}

/// The order as one line of JSON, followed by the template's bytes.
///
/// Three files are sent before those of the template: the VM's lock, the pipe for reports and the
/// launcher's lifeline.
#[derive(Serialize, Deserialize)]
struct Message {
    dir: Vec<u8>,
    record: Record,
    net: Vec<String>,
    drive: Vec<String>,
    vsock: Option<Vec<u8>>,
    cid: Option<u32>,
    number: Option<u32>,
    makes_taps: bool,
    boot_patience_ms: u64,
    jailed: bool,
    ttl_ms: Option<u64>,
    still: bool,
    placeholders: Option<Placeholders>,
    template_bytes: u64,
    /// The disks and the kernel of a VM that is booted, in place of a template.
    boot: Option<BootOrder>,
}

/// A process that waits for its order. Dropping it ends the process.
#[derive(Debug)]
pub struct Shell {
    /// None once the process has got its order.
    child: Option<Child>,
    socket: UnixStream,
}

impl Shell {
    pub fn start() -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        let child = process::exec_self(NAME, theirs.into())?;
        Ok(Self { child: Some(child), socket })
    }

    /// Returns whether the process still waits.
    pub fn is_waiting(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| !child.has_ended())
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill();
            // An error means that there is no child to wait for.
            let _ = child.wait();
        }
    }
}

/// Sends an order to a process that waits for one, or to a new one.
pub fn spawn(
    order: &Order<'_>,
    claim: &Claim,
    waiting: Option<Shell>,
) -> Result<VmmProcess, Failure> {
    let failed =
        |error: io::Error| Failure::fault(format!("cannot start the VMM process: {error}"));
    let (reports, reporter) = io::pipe().map_err(failed)?;
    let (lifeline, held) = io::pipe().map_err(failed)?;
    let mut shell = waiting.map_or_else(Shell::start, Ok).map_err(failed)?;
    let Some(child) = shell.child.take() else {
        return Err(failed(io::ErrorKind::NotFound.into()));
    };
    let mut vmm = VmmProcess::new(child, reports, held, claim);
    match send(&shell.socket, order, claim, reporter, lifeline) {
        Ok(()) => Ok(vmm),
        Err(error) => {
            vmm.end();
            Err(failed(error))
        }
    }
}

fn send(
    mut socket: &UnixStream,
    order: &Order<'_>,
    claim: &Claim,
    reporter: PipeWriter,
    lifeline: PipeReader,
) -> io::Result<()> {
    socket.set_write_timeout(Some(PATIENCE))?;
    let mut files = vec![claim.lock()?, OwnedFd::from(reporter), OwnedFd::from(lifeline)];
    let (boot, bytes) = match order.machine {
        CopySource::Template(template) => {
            for file in &template.files {
                files.push(file.try_clone()?);
            }
            (None, template.bytes.as_slice())
        }
        CopySource::Disks(disks) => {
            let (boot, disks) = disks.order()?;
            files.extend(disks);
            (Some(boot), [].as_slice())
        }
    };
    let message = Message {
        dir: claim.dir().path().as_os_str().as_bytes().to_vec(),
        record: order.record.clone(),
        net: order.flags.net.clone(),
        drive: order.flags.drive.clone(),
        vsock: order.flags.vsock.as_ref().map(|path| path.as_os_str().as_bytes().to_vec()),
        cid: order.flags.cid,
        number: order.number,
        makes_taps: order.makes_taps,
        boot_patience_ms: order.boot_patience.as_millis() as u64,
        jailed: order.jailed,
        ttl_ms: order.ttl.map(|ttl| ttl.as_millis() as u64),
        still: order.still,
        placeholders: order.placeholders.cloned(),
        template_bytes: bytes.len() as u64,
        boot,
    };
    let mut line = serde_json::to_vec(&message)?;
    line.push(b'\n');
    let sent = passing::send(socket, &line, &files)?;
    socket.write_all(&line[sent..])?;
    socket.write_all(bytes)
}

/// The main function of a process that [`spawn`] has started.
pub(super) fn run() -> ! {
    // Without an order there is nobody to report to; the launcher notices that this process ended.
    if let Ok(received) = Received::read() {
        received.carry_out();
    }
    process::leave_now(failure::FAULT.into())
}

/// The order and the files received over the socket, before the rest of the template.
struct Received {
    socket: UnixStream,
    message: Message,
    lock: File,
    reporter: PipeWriter,
    lifeline: PipeReader,
    /// The bytes of the template that have arrived, and its files.
    machine: HandedOver,
}

impl Received {
    fn read() -> io::Result<Self> {
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        // The order may come at any time; once it has begun, the rest follows at once.
        poll::readable(&[socket.as_fd()], None)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let (line, bytes, files) = passing::receive_line(&socket, MAX_ORDERS)?;
        let message: Message = serde_json::from_slice(&line)?;
        let mut files = files.into_iter();
        let mut next = || files.next().ok_or_else(|| io::Error::other("a file is missing"));
        let (lock, reporter, lifeline) = (next()?.into(), next()?.into(), next()?.into());
        // The connections are in the VM's directory, for its egress process.
        let machine = HandedOver { bytes, files: files.collect(), note: Note::default() };
        Ok(Self { socket, message, lock, reporter, lifeline, machine })
    }

    /// Reads the rest of the template.
    fn read_template(&mut self) -> io::Result<()> {
        let (asked, bytes) = (self.message.template_bytes, &mut self.machine.bytes);
        if asked > MAX_TEMPLATE {
            return Err(io::Error::other("the template is too large"));
        }
        let left = asked.saturating_sub(bytes.len() as u64);
        (&mut self.socket).take(left).read_to_end(bytes)?;
        if bytes.len() as u64 == asked { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Runs the monitor process. Returns only if the order is invalid, after reporting that.
    fn carry_out(mut self) {
        let template = self.read_template();
        let Self { socket, message, lock, reporter, lifeline, machine } = self;
        drop(socket);
        let claim = Claim::adopt(path(message.dir.clone()), lock);
        let failed =
            |error| Failure::fault(format!("the VMM process cannot read the template: {error}"));
        match template.map_err(failed).and_then(|()| message.plan(machine)) {
            Ok(plan) => supervisor::run(plan, &claim, reporter, lifeline),
            Err(failure) => Reporter { pipe: reporter }.failed(failure),
        }
    }
}

impl Message {
    fn plan(self, machine: HandedOver) -> Result<Plan, Failure> {
        let (net, drive, cid) = (self.net, self.drive, self.cid);
        let flags = CopyFlags { net, drive, vsock: self.vsock.map(path), cid };
        let copy = flags.of_copy(self.number, self.makes_taps)?;
        let mut extras = Extras::default();
        let start = match self.boot {
            None => Start::Template(Arc::new(machine.template()?)),
            Some(order) => {
                extras.cpu = order.cpu.clone();
                let (parts, card) = order.parts(machine.files, &copy)?;
                extras.net = card;
                Start::Boot(Box::new(parts))
            }
        };
        Ok(Plan {
            copy,
            start,
            record: self.record,
            console_copy: None,
            boot_patience: Duration::from_millis(self.boot_patience_ms),
            jailed: self.jailed,
            ttl: self.ttl_ms.map(Duration::from_millis),
            still: self.still,
            mode: Mode::Detached { command: None },
            ports: Vec::new(),
            extras,
            frames: None,
            placeholders: self.placeholders,
        })
    }
}

fn path(bytes: Vec<u8>) -> PathBuf {
    OsString::from_vec(bytes).into()
}
