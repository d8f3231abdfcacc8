//! Starts VMs from a template: the forks of a running VM, of a warm template or of a snapshot.
//!
//! Each VM gets a directory, a user and processes of its own; all share the pages that none has
//! changed.

use std::time::{Duration, Instant};

use pvmm::Template;

use crate::control::Note;
use crate::failure::Failure;
use crate::overrides::CopyFlags;
use crate::secrets::{self, VmSecrets};
use crate::sys::process;
use crate::sys::signals::Signals;
use crate::vm_dir::{Base, Claim, Egress, Record, UidRange, VmDir, VolumeMount, now};
use crate::vmm_process::VmmProcess;
use crate::vmm_process::copy::{self, CopySource, Order};
use crate::vmm_process::shells::Shells;

/// How long a copy may take until its agent has answered.
const PATIENCE: Duration = Duration::from_secs(60);

/// How the processes of a VM are kept.
#[derive(Clone, Debug)]
pub struct StartOptions {
    /// Whether the monitor process is put into a jail.
    pub jailed: bool,
    /// With root: the users of which each VM gets one.
    pub users: UidRange,
    /// How long the VM may live.
    pub ttl: Option<Duration>,
    /// Whether the workload of a copy stands still for ever, and the copy keeps the identity of the
    /// original: for a look at its files.
    pub still: bool,
}

impl StartOptions {
    /// Returns the users that VMs get, if they get any.
    pub fn users(&self) -> Option<&UidRange> {
        (self.jailed && process::effective_uid() == 0).then_some(&self.users)
    }
}

/// The template, overrides and record that copies are made from.
pub struct Copies<'a> {
    pub machine: CopySource<'a>,
    pub like: Record,
    pub flags: CopyFlags,
    /// Images behind the template's spare drives.
    pub volumes: Vec<VolumeMount>,
    pub makes_taps: bool,
    pub start: StartOptions,
    /// The policy of a network card without a tap, if the template has one.
    pub egress: Egress,
    /// The secrets of the copies, if they have any.
    pub secrets: Option<VmSecrets>,
    /// Processes that wait for an order.
    pub shells: Option<&'a Shells>,
}

impl Copies<'_> {
    /// Starts a VM for each name, all at once. A VM of which [`RunningVm::keep`] is not called ends
    /// when it is dropped.
    pub fn start(
        &self,
        base: &Base,
        names: Vec<Option<String>>,
    ) -> Result<Vec<RunningVm>, Failure> {
        let several = names.len() > 1;
        // Invalid overrides are refused before anything is created.
        let parts = self.flags.of_copy(several.then_some(1), self.makes_taps)?;
        if let CopySource::Disks(disks) = self.machine {
            disks.check(&parts, self.volumes.len())?;
        }
        let numbered = (1..).zip(names);
        numbered.map(|(number, name)| self.spawn(base, name, several.then_some(number))).collect()
    }

    fn spawn(
        &self,
        base: &Base,
        name: Option<String>,
        number: Option<u32>,
    ) -> Result<RunningVm, Failure> {
        let record = Record {
            name,
            created: now(),
            template: self.like.template.clone(),
            kernel: self.like.kernel.clone(),
            kernel_file: self.like.kernel_file.clone(),
            cpus: self.like.cpus,
            memory_mib: self.like.memory_mib,
            volumes: self.volumes.clone(),
            ..Record::default()
        };
        let mut claim = base.create(record, self.start.users())?;
        let (inherited, boot_patience) = match self.machine {
            CopySource::Template(machine) => (machine.note.connections.clone(), PATIENCE),
            CopySource::Disks(disks) => (Vec::new(), disks.boot_patience),
        };
        claim.dir().write_egress(&Egress { inherited, ..self.egress.clone() })?;
        if let Some(secrets) = &self.secrets {
            secrets::install(&secrets.values, claim.dir())?;
        }
        let order = Order {
            machine: self.machine,
            record: claim.dir().read_record().unwrap_or_default(),
            flags: &self.flags,
            number,
            makes_taps: self.makes_taps,
            boot_patience,
            jailed: self.start.jailed,
            ttl: self.start.ttl,
            still: self.start.still,
            placeholders: self.secrets.as_ref().and_then(|secrets| secrets.shown.as_ref()),
        };
        let process = copy::spawn(&order, &claim, self.shells.and_then(Shells::take))?;
        claim.hand_over_lock();
        Ok(RunningVm::new(process, claim))
    }
}

/// Returns `record` with the size of the template, and with its kernel if the template knows it.
pub fn sized(record: Record, template: &Template) -> Record {
    let mut record =
        Record { cpus: template.vcpus() as u32, memory_mib: template.memory_mib(), ..record };
    let note = Note::read(template.note());
    if note.kernel_file.is_some() {
        (record.kernel, record.kernel_file) = (note.kernel, note.kernel_file);
    }
    record
}

/// A VM that is removed on drop, unless kept: first its processes, then its directory.
pub struct RunningVm {
    pub process: VmmProcess,
    claim: Claim,
    kept: bool,
}

impl RunningVm {
    pub fn new(process: VmmProcess, claim: Claim) -> Self {
        Self { process, claim, kept: false }
    }

    pub fn dir(&self) -> &VmDir {
        self.claim.dir()
    }

    /// Waits until the guest's agent answers, and returns the layers that the jail lacks. A signal
    /// or the deadline makes it fail.
    pub fn wait_ready(
        &mut self,
        signals: Option<&Signals>,
        deadline: Option<Instant>,
    ) -> Result<Vec<String>, Failure> {
        self.process.wait_ready(signals, deadline)
    }

    /// Lets the VM run on after this process. Returns its id.
    pub fn keep(mut self) -> Result<String, Failure> {
        let id = self.dir().read_record().unwrap_or_default().id;
        self.process.keep()?;
        self.kept = true;
        self.claim.keep();
        Ok(id)
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        if !self.kept {
            self.process.end();
        }
    }
}
