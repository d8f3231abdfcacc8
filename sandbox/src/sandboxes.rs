//! The sandboxes of one runtime directory: made from warm templates and snapshots, found, ended.
//!
//! For programs that live on after a sandbox was made, such as the service. Everything here blocks.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::snapshot::{LoadOptions, Manifest, SnapshotKind, WriteOptions};
use pvmm::{CpuBaseline, Kvm, Template};
use pvmm_egress::policy::PolicyDocument;

use crate::checkpoint_tree::Checkpoint;
use crate::control::{self, ControlRequest, HandedOver};
use crate::copies::{Copies, RunningVm, StartOptions, sized};
use crate::denial_log::DenialLog;
use crate::disk_snapshot::DiskSnapshot;
use crate::egress;
use crate::end;
use crate::failure::{Failure, FailureKind};
use crate::file_diff::{self, DiffOptions, FileDiff};
use crate::guest_agent;
use crate::jail;
use crate::net;
use crate::overrides::CopyFlags;
use crate::secrets;
use crate::snapshots;
use crate::sys::process::Child;
use crate::usage::Usage;
use crate::vm_dir::{Base, Egress, Record, VmEntry, VmStatus, VolumeMount};
use crate::vmm_process::copy::CopySource;
use crate::vmm_process::shells::Shells;
use crate::vmm_process::{STILL_MAX, volume};
use crate::warm::{self, Shape};

/// The sandboxes of one runtime directory.
#[derive(Clone, Debug)]
pub struct Sandboxes {
    base: Base,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Warm templates that are loaded, by their folders.
    templates: Mutex<HashMap<PathBuf, Arc<Loaded>>>,
    /// Supervisors that this process has started, to be waited for at their end.
    supervisors: Mutex<Vec<Child>>,
    /// Processes for the next sandboxes.
    shells: Shells,
}

#[derive(Debug)]
struct Loaded {
    machine: HandedOver,
    like: Record,
}

/// The properties of a new sandbox.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    pub template: String,
    pub cpus: u32,
    pub memory_mib: u64,
    pub disk_mib: u64,
    /// The processor features that the guest of a template is offered.
    pub cpu: CpuBaseline,
    pub name: Option<String>,
    /// How long the sandbox may live.
    pub ttl: Option<Duration>,
    /// The network of the sandbox; none by default.
    pub egress: Option<Egress>,
    pub volumes: Vec<VolumeMount>,
    /// Whether its process is put into a jail.
    pub jailed: bool,
}

/// The properties of forks.
#[derive(Clone, Debug, Default)]
pub struct ForkOptions {
    /// The checkpoint whose state they begin with; without one, the present.
    pub at: Option<String>,
    /// A name for each fork, or none.
    pub names: Vec<Option<String>>,
    pub ttl: Option<Duration>,
    /// Whether the processes of the forks are left without a jail.
    pub unjailed: bool,
}

impl CreateOptions {
    /// A sandbox of the default size from this template.
    pub fn of(template: &str) -> Self {
        let Shape { template, cpus, memory_mib, disk_mib, cpu, .. } = Shape::of(template);
        Self {
            template,
            cpus,
            memory_mib,
            disk_mib,
            cpu,
            name: None,
            ttl: None,
            egress: None,
            volumes: Vec::new(),
            jailed: true,
        }
    }

    /// Returns the shape of the warm template that such a sandbox is made from.
    pub fn shape(&self) -> Shape {
        Shape {
            template: self.template.clone(),
            cpus: self.cpus,
            memory_mib: self.memory_mib,
            disk_mib: self.disk_mib,
            cpu: self.cpu.clone(),
            net: self.egress.is_some(),
            spare_drives: self.volumes.iter().map(|volume| volume.read_only).collect(),
        }
    }
}

impl Sandboxes {
    pub fn open() -> Result<Self, Failure> {
        Self::with_shells(0)
    }

    /// Opens them with a pool of processes for the next sandboxes, which [`Self::prepare`] fills.
    pub fn with_shells(shells: usize) -> Result<Self, Failure> {
        let shared = Shared { shells: Shells::new(shells), ..Shared::default() };
        Ok(Self { base: Base::open()?, shared: Arc::new(shared) })
    }

    /// Starts the processes for the next sandboxes.
    pub fn prepare(&self) -> Result<(), Failure> {
        Ok(self.shared.shells.fill()?)
    }

    /// Returns how many processes wait for a sandbox, and how many should.
    pub fn prepared(&self) -> (usize, usize) {
        self.shared.shells.count()
    }

    /// Returns the runtime directory.
    pub fn runtime_dir(&self) -> &Path {
        self.base.path()
    }

    /// Makes a sandbox from the warm template of its shape; fails with `Conflict` if that template
    /// was not baked. Returns when the guest's agent has answered.
    pub fn create(&self, options: &CreateOptions) -> Result<Sandbox, Failure> {
        let loaded = self.load(&options.shape())?;
        self.start(CopySource::Template(&loaded.machine), loaded.like.clone(), options)
    }

    /// Makes a sandbox from a snapshot. One of disks alone is booted, with the size and the network
    /// of `options`; any other goes on with its own.
    pub fn restore(&self, folder: &Path, options: &CreateOptions) -> Result<Sandbox, Failure> {
        let roots =
            Some(snapshots::roots(folder.parent().map(Path::to_owned).into_iter().collect()));
        let load = LoadOptions { roots, ..LoadOptions::default() };
        let record = Record { template: options.template.clone(), ..Record::default() };
        let manifest = Manifest::read(folder);
        if manifest.is_ok_and(|manifest| manifest.kind() == SnapshotKind::Disk) {
            let mut disks = DiskSnapshot::open(folder, &load, None)?;
            disks.taps = options.egress.iter().map(|_| egress::LINK_NAME.to_owned()).collect();
            (disks.cpus, disks.memory_mib) = (options.cpus, options.memory_mib);
            return self.start(CopySource::Disks(&disks), disks.described(record), options);
        }
        let template = Kvm::open().and_then(|kvm| Template::load(&kvm, folder, load));
        let template = template.map_err(|error| Failure::fault(format!("{error:#}")))?;
        let machine = HandedOver::of(&template)?;
        self.start(CopySource::Template(&machine), sized(record, &template), options)
    }

    /// Finds a sandbox by its id, its name or an unambiguous start of its id.
    pub fn get(&self, reference: &str) -> Result<Sandbox, Failure> {
        self.reap();
        Ok(Sandbox { entry: Arc::new(self.base.find(reference)?), owner: self.clone() })
    }

    /// Lists all sandboxes, those of other programs too.
    pub fn list(&self) -> Result<Vec<Sandbox>, Failure> {
        self.reap();
        let owned = |entry| Sandbox { entry: Arc::new(entry), owner: self.clone() };
        Ok(self.base.list()?.into_iter().map(owned).collect())
    }

    /// Whether a sandbox of this shape can be made at once.
    pub fn is_warm(&self, shape: &Shape) -> bool {
        warm::folder(shape).is_some()
    }

    /// Returns the warm template of a shape, loaded once.
    fn load(&self, shape: &Shape) -> Result<Arc<Loaded>, Failure> {
        let cold = || {
            Failure::fault(format!("template '{}' is not warm in this shape", shape.template))
                .of_kind(FailureKind::Conflict)
                .hint("bake it first: pvmm template bake")
        };
        let folder = warm::folder(shape).ok_or_else(cold)?;
        if let Some(loaded) = lock(&self.shared.templates).get(&folder) {
            return Ok(loaded.clone());
        }
        let warm = warm::find(shape).ok_or_else(cold)?;
        let record = Record {
            template: shape.template.clone(),
            kernel: warm.kernel,
            kernel_file: warm.kernel_file,
            ..Record::default()
        };
        let machine = HandedOver::of(&warm.template)?;
        let loaded = Arc::new(Loaded { machine, like: sized(record, &warm.template) });
        let mut templates = lock(&self.shared.templates);
        // A template that was removed or baked again is not needed any more.
        templates.retain(|folder, _| folder.exists());
        templates.insert(folder, loaded.clone());
        Ok(loaded)
    }

    fn start(
        &self,
        machine: CopySource<'_>,
        like: Record,
        options: &CreateOptions,
    ) -> Result<Sandbox, Failure> {
        let copies = Copies {
            machine,
            like,
            flags: CopyFlags::default(),
            volumes: options.volumes.clone(),
            makes_taps: false,
            start: start_options(options.jailed, options.ttl)?,
            egress: options.egress.clone().unwrap_or_default(),
            secrets: None,
            shells: Some(&self.shared.shells),
        };
        let mut started = copies.start(&self.base, vec![options.name.clone()])?;
        let Some(mut vm) = started.pop() else { return Err(Failure::fault("no VM was started")) };
        vm.wait_ready(None, None)?;
        self.keep(vm)
    }

    fn keep(&self, vm: RunningVm) -> Result<Sandbox, Failure> {
        let supervisor = vm.process.supervisor();
        let id = vm.keep();
        lock(&self.shared.supervisors).push(supervisor);
        self.get(&id?)
    }

    /// Waits for supervisors that have ended, so that they do not stay as zombies.
    fn reap(&self) {
        lock(&self.shared.supervisors).retain_mut(|supervisor| !supervisor.has_ended());
    }
}

/// A sandbox, in the state in which it was found.
#[derive(Clone, Debug)]
pub struct Sandbox {
    entry: Arc<VmEntry>,
    owner: Sandboxes,
}

impl Sandbox {
    pub fn id(&self) -> &str {
        &self.entry.record.id
    }

    pub fn record(&self) -> &Record {
        &self.entry.record
    }

    pub fn status(&self) -> &VmStatus {
        &self.entry.state
    }

    /// Returns the network of the sandbox, if it has one with a policy.
    pub fn egress(&self) -> Option<Egress> {
        self.entry.dir.read_egress().filter(|_| self.entry.has_egress())
    }

    /// Returns the memory and processor time of the sandbox's monitor process, in which the guest
    /// runs.
    pub fn usage(&self) -> Option<Usage> {
        self.record().pid.and_then(Usage::of)
    }

    /// Returns how many attempts of the guest to reach the network were denied since its network
    /// process has started.
    pub fn denied(&self) -> Option<u64> {
        net::denied(&self.entry)
    }

    /// Returns the log of the sandbox's network process, to be read from its start.
    pub fn denial_log(&self) -> DenialLog {
        DenialLog::of(&self.entry)
    }

    /// Returns the path of the guest's console log.
    pub fn console_log(&self) -> PathBuf {
        self.entry.dir.run().console_log()
    }

    /// Connects to the guest's agent.
    pub fn agent(&self) -> Result<Agent, Failure> {
        self.entry.require_running()?;
        guest_agent::connect(&self.entry.dir, guest_agent::PATIENCE).map_err(guest_agent::refuse)
    }

    /// Makes forks, all of one moment; the sandbox goes on.
    pub fn fork(&self, options: &ForkOptions) -> Result<Vec<Sandbox>, Failure> {
        let machine = control::hand_over_at(&self.entry, options.at.as_deref())?;
        let template = format!("fork of {}", self.entry.label());
        let copies = Copies {
            machine: CopySource::Template(&machine),
            like: Record { template, ..self.record().clone() },
            flags: CopyFlags::default(),
            volumes: Vec::new(),
            makes_taps: true,
            start: start_options(!options.unjailed, options.ttl)?,
            egress: self.egress().unwrap_or_default(),
            secrets: secrets::of_vm(&self.entry.dir)?,
            shells: Some(&self.owner.shared.shells),
        };
        let mut forks = copies.start(&self.owner.base, options.names.clone())?;
        for fork in &mut forks {
            fork.wait_ready(None, None)?;
        }
        forks.into_iter().map(|fork| self.owner.keep(fork)).collect()
    }

    pub fn pause(&self) -> Result<(), Failure> {
        control::pause(&self.entry, true)
    }

    pub fn resume(&self) -> Result<(), Failure> {
        control::pause(&self.entry, false)
    }

    /// Keeps the present state as a checkpoint, of this name or numbered.
    pub fn checkpoint(&self, name: Option<&str>) -> Result<Checkpoint, Failure> {
        control::checkpoint(&self.entry, name)
    }

    /// Lists the checkpoints, oldest first.
    pub fn checkpoints(&self) -> Result<Vec<Checkpoint>, Failure> {
        control::checkpoints(&self.entry)
    }

    /// Takes the sandbox to a checkpoint; without a name, back to the one that it stands on.
    pub fn checkout(&self, name: Option<&str>) -> Result<(), Failure> {
        control::checkout(&self.entry, name)
    }

    /// Deletes a checkpoint; the sandbox goes on.
    pub fn delete_checkpoint(&self, name: &str) -> Result<(), Failure> {
        control::delete_checkpoint(&self.entry, name)
    }

    /// Lists the files that differ between two moments; the sandbox goes on meanwhile.
    pub fn diff(&self, options: &DiffOptions) -> Result<FileDiff, Failure> {
        file_diff::diff(&self.owner.base, &self.entry, options)
    }

    /// Writes a snapshot; the sandbox goes on meanwhile.
    pub fn snapshot(&self, folder: &Path) -> Result<Manifest, Failure> {
        write(&control::freeze(&self.entry)?, folder, false)
    }

    /// Writes a snapshot of the sandbox's disks alone; the sandbox goes on meanwhile.
    pub fn snapshot_disks(&self, folder: &Path) -> Result<Manifest, Failure> {
        write(&control::freeze_disks(&self.entry)?, folder, true)
    }

    /// Writes a snapshot and ends the sandbox, whose workload stands still from the snapshot on. If
    /// that fails the sandbox goes on.
    pub fn hibernate(&self, folder: &Path) -> Result<Manifest, Failure> {
        let begun = Instant::now();
        let (template, connection) = control::freeze_still(&self.entry)?;
        let written = write(&template, folder, false).and_then(|manifest| {
            if begun.elapsed() < STILL_MAX {
                return Ok(manifest);
            }
            // The workload has gone on by itself: what it did since is not in the snapshot.
            let _ = std::fs::remove_dir_all(folder);
            Err(Failure::fault("the snapshot took too long to write").of_kind(FailureKind::Timeout))
        });
        let ended = match written {
            Ok(manifest) => self.kill().map(|()| manifest),
            Err(failure) => control::ask(&self.entry, ControlRequest::Thaw).and(Err(failure)),
        };
        // If this process is killed before, the workload goes on.
        drop(connection);
        ended
    }

    /// Sets how long the sandbox may live from now on.
    pub fn set_ttl(&self, ttl: Option<Duration>) -> Result<(), Failure> {
        control::set_ttl(&self.entry, ttl)
    }

    /// Replaces the network policy as a whole.
    pub fn set_egress(&self, policy: &PolicyDocument) -> Result<(), Failure> {
        net::change(&self.entry, |old| *old = policy.clone())
    }

    /// Ends the sandbox once its volumes are written, and removes its directory.
    pub fn end(&self) -> Result<(), Failure> {
        if *self.status() == VmStatus::Running {
            volume::flush(&self.entry.dir.run().vsock(), &self.record().volumes);
        }
        self.kill()
    }

    /// Ends the sandbox at once, and removes its directory.
    fn kill(&self) -> Result<(), Failure> {
        // The state may have changed since the sandbox was found.
        let entry = match self.owner.base.find(self.id()) {
            Ok(entry) => entry,
            Err(crate::vm_dir::VmDirError::Unknown(_)) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if entry.state.is_alive() {
            end::end(&entry, true)?;
        }
        self.owner.base.discard(&entry)?;
        self.owner.reap();
        Ok(())
    }
}

fn start_options(jailed: bool, ttl: Option<Duration>) -> Result<StartOptions, Failure> {
    Ok(StartOptions { jailed, users: jail::default_users()?, ttl, still: false })
}

fn write(template: &Template, folder: &Path, disk_only: bool) -> Result<Manifest, Failure> {
    let options = WriteOptions { disk_only, ..WriteOptions::default() };
    let written = template.write(folder, options).inspect(|_| snapshots::remember(folder));
    written.map_err(|error| {
        let failure = Failure::fault(format!("{error:#}"));
        let full = error_chain(&error).any(|error| {
            error
                .downcast_ref::<std::io::Error>()
                .is_some_and(|error| error.kind() == std::io::ErrorKind::StorageFull)
        });
        if full { failure.of_kind(FailureKind::DiskFull) } else { failure }
    })
}

fn error_chain<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
