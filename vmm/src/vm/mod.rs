//! `Vm`, the handle of one virtual machine, and everything that its owner can do with it; in
//! `template.rs` the same for `Template`.
//!
//! Each method delegates to the recipe of its name or to the part that it concerns.

mod template;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_devices::virtio::MmioTransport;
use pvmm_devices::virtio::balloon::BalloonStats;
pub use pvmm_devices::virtio::counters::CounterValues;
use serde_json::Value;

use crate::agent::{Agent, ReadyListener, Refresh};
use crate::config::{DriveSource, RateLimiterConfig, VmConfig};
use crate::error::{Error, ErrorKind};
use crate::kvm::Kvm;
use crate::machine::{Hinting, Machine, balloon, drives, nets};
use crate::memory::Adoption;
use crate::outcome::Outcome;
use crate::snapshot::{self, SaveKind};
use crate::{boot, freeze, refresh, rollback, sys};

pub use template::{Forked, Template, Touched, UnfinishedTemplate};

/// The counters of one virtio device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCounters {
    /// `block`, `net`, `vsock`, …
    pub device: &'static str,
    /// The counters at the time of the call.
    pub values: CounterValues,
}

/// A virtual machine. Dropping it stops its vCPUs and then its devices.
pub struct Vm {
    machine: Machine,
}

/// Returns the age at which a fork that is `age` old is best trimmed: after its first work, and
/// then whenever its age has doubled. An idle guest still wakes now and then and writes a little.
pub fn next_trim(age: Duration) -> Duration {
    let mut at = Duration::from_secs(8);
    while at <= age {
        at *= 2;
    }
    at
}

impl Vm {
    /// Boots the VM that `config` describes. It is paused before its first instruction.
    pub fn boot(kvm: &Kvm, config: VmConfig) -> Result<Self, Error> {
        boot::boot(kvm, config).map(Self::new)
    }

    pub(crate) fn new(machine: Machine) -> Self {
        Self { machine }
    }

    pub(crate) fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    /// Lets the guest run. After an error it does not run, unless the error is of kind
    /// [`ErrorKind::Broken`].
    pub fn resume(&mut self) -> Result<(), Error> {
        self.machine.resume()
    }

    /// Stops the guest: first its vCPUs, all at once, then its devices. When this returns nothing
    /// writes guest memory any more. After an error the VM runs on as a whole, unless the error is
    /// of kind [`ErrorKind::Broken`].
    pub fn pause(&mut self) -> Result<(), Error> {
        self.machine.pause()
    }

    /// Resumes a VM that was forked or rolled back, and has its agent refresh it. If the refresh
    /// fails, the VM is paused again.
    pub fn resume_refreshed(
        &mut self,
        refresh: &Refresh,
        deadline: Instant,
    ) -> Result<Agent, Error> {
        refresh::resume_refreshed(&mut self.machine, refresh, deadline)
    }

    /// Waits until the guest is idle, at most for `max`. A template that is made of an idle guest
    /// needs less memory and time in every fork.
    pub fn settle(&self, max: Duration) {
        freeze::settle(&self.machine, max);
    }

    /// Makes a template of the VM as it is now. A VM that ran runs on. With an agent in the guest,
    /// call [`Agent::freeze`] before and [`Agent::thaw`] after it, so that in forks no workload
    /// runs before they are refreshed. Much memory is copied; [`Vm::adopt`] makes the VM share the
    /// copy.
    pub fn freeze(&mut self) -> Result<Template, Error> {
        self.begin_freeze()?.finish()
    }

    /// Begins a freeze, and returns as soon as the VM runs on, if it ran before. The workload can
    /// be thawed then, however long [`UnfinishedTemplate::finish`] takes to copy memory.
    pub fn begin_freeze(&mut self) -> Result<UnfinishedTemplate, Error> {
        freeze::begin_freeze(&mut self.machine).map(UnfinishedTemplate::new)
    }

    /// Makes a template of the VM's disks as they are now, without memory, for a snapshot with
    /// [`crate::snapshot::WriteOptions::disk_only`]. A VM that ran runs on. The guest's own caches
    /// are not on its disks: call [`Agent::freeze_with`] with `sync` before.
    pub fn freeze_disks(&mut self) -> Result<Template, Error> {
        freeze::freeze_disks(&mut self.machine).map(Template::new)
    }

    /// Copies the drives that are written in place and cannot share blocks with a copy, while the
    /// guest runs. [`Self::freeze`] does this too. A caller that freezes the guest's workload calls
    /// it before that: copying takes as long as the file is large.
    pub fn prepare_freeze(&mut self) -> Result<(), Error> {
        drives::prepare_copies(&mut self.machine)
    }

    /// Keeps the present of the VM, in place of an earlier checkpoint. A VM that ran runs on.
    pub fn checkpoint(&mut self) -> Result<(), Error> {
        let frozen = rollback::take_checkpoint(&mut self.machine)?;
        self.machine.checkpoint = Some(frozen);
        Ok(())
    }

    /// Makes a template of the VM as it is now, to which [`Self::checkout`] can take this VM back
    /// later. Any number of them can be kept, and forked like every other template. A VM that ran
    /// runs on. Fails if a drive is written in place.
    pub fn take_checkpoint(&mut self) -> Result<Template, Error> {
        rollback::take_checkpoint(&mut self.machine).map(Template::new)
    }

    /// Takes the VM to a checkpoint that [`Self::take_checkpoint`] made of it, before or after the
    /// present one and on any branch of its history, in all else like [`Self::rollback`].
    pub fn checkout(&mut self, to: &Template) -> Result<(), Error> {
        rollback::checkout(&mut self.machine, to.frozen())
    }

    /// Takes the VM back to its checkpoint. A VM that ran runs on from there.
    ///
    /// A guest that has ended lives again. Connections through vsock are reset. The generation is
    /// new, so that the guest's kernel does not draw the same random numbers twice. Programs in the
    /// guest may, and the guest's clock shows the time of the checkpoint: pause the VM first and go
    /// on with [`Self::resume_refreshed`], unless the guest has no agent.
    ///
    /// If a drive cannot be taken back, nothing is, and the VM runs on. After any later error the
    /// VM has ended, and the error is of kind [`ErrorKind::Broken`].
    pub fn rollback(&mut self) -> Result<(), Error> {
        rollback::rollback(&mut self.machine)
    }

    /// Writes the VM, which must be paused, as two files. Each gets its name when all of it is on
    /// the disk, memory first; files of these names are replaced. A writer that is killed leaves
    /// the old pair, the new one, or memory that the old state does not take. Drives are recorded
    /// by their paths and not copied, so a caller that wants to go back keeps them too; guest
    /// writes to them are synced first.
    ///
    /// `note` belongs to the caller and has at most [`crate::NOTE_MAX`] bytes; [`Template::note`]
    /// returns it.
    pub fn save_files(
        &mut self,
        state: &Path,
        memory: &Path,
        kind: SaveKind,
        note: &[u8],
    ) -> Result<(), Error> {
        snapshot::save_files(&mut self.machine, state, memory, kind, note)
    }

    /// Writes the pages that the VM has touched since it was loaded from two files to a third, for
    /// [`Template::use_working_set`]. To be called once, when the VM has done what users do first
    /// and before it is saved again; it may run. Fails for a VM that came from elsewhere.
    pub fn keep_working_set(&self, file: &Path) -> Result<(), Error> {
        let Some(sums) = &self.machine.resources.memory_sums else {
            let what = "working set: the machine was not loaded from two files";
            return Err(Error::plain(ErrorKind::InvalidConfig, what));
        };
        let set = self.machine.memory.learned()?;
        Ok(snapshot::write_working_set(file, sums, &set)?)
    }

    /// Gives back guest memory that the VM need not have of its own: pages that equal the memory
    /// image, and pages that equal the recorded sibling of its template. Pauses a VM that runs for
    /// a moment. Returns the number of bytes given back. [`next_trim`] says when to call it.
    pub fn trim(&mut self) -> Result<u64, Error> {
        if self.machine.page_server.is_some() {
            // The page server would be asked a second time for a page that was given back.
            return Ok(0);
        }
        let was_running = self.machine.running;
        self.pause()?;
        let trimmed = self.machine.memory.trim();
        if was_running {
            self.resume()?;
        }
        Ok(trimmed?)
    }

    /// Maps the memory that was copied for a template in place of pages of this VM that equal it,
    /// about `max` bytes of it, so that the VM shares them with its forks. Pauses a VM that runs
    /// for as long as that takes. Returns whether there is more to do; to be called until then.
    pub fn adopt(&mut self, adoption: &mut Adoption, max: u64) -> Result<bool, Error> {
        if !self.machine.memory.can_adopt(adoption) {
            return Ok(false);
        }
        let was_running = self.machine.running;
        self.pause()?;
        let more = self.machine.memory.adopt(adoption, max);
        if was_running {
            self.resume()?;
        }
        Ok(more?)
    }

    /// Waits up to `timeout` for the guest to end. `None` means that it has not.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Outcome> {
        self.machine.ending.wait(timeout)
    }

    /// Returns a descriptor that is readable once the guest has ended, for a caller with an event
    /// loop.
    pub fn outcome_fd(&self) -> BorrowedFd<'_> {
        sys::borrowed(self.machine.ending.event())
    }

    /// Types at the guest's serial console. Returns how many bytes were taken; if that was not all,
    /// wait for [`Self::serial_room_fd`] before offering the rest.
    pub fn type_serial(&self, bytes: &[u8]) -> usize {
        // Cleared before, so that room that appears in between is still noticed.
        let _ = self.machine.serial.input_room().read();
        self.machine.serial.feed(bytes)
    }

    /// Presses Ctrl-Alt-Del, which restarts a guest with a keyboard
    /// ([`crate::VmConfig::keyboard`]) and a driver for it.
    pub fn press_ctrl_alt_del(&self) {
        self.machine.keyboard.press_ctrl_alt_del();
    }

    /// Returns a descriptor that is readable when the guest has read from its console and there is
    /// room again, until the next [`Self::type_serial`].
    pub fn serial_room_fd(&self) -> BorrowedFd<'_> {
        sys::borrowed(self.machine.serial.input_room())
    }

    /// Gives the guest a new generation identifier, upon which its kernel reseeds its random
    /// generator. Forks and rollbacks do this themselves.
    pub fn renew_generation(&self) -> Result<(), Error> {
        Ok(self.machine.generation.renew()?)
    }

    /// Returns how often the guest accessed an address or port that no device has.
    pub fn missed_accesses(&self) -> u64 {
        self.machine.buses.missed()
    }

    /// Returns the counters of each virtio device, in the guest's order.
    pub fn device_counters(&self) -> Vec<DeviceCounters> {
        let of = |transport: &Arc<MmioTransport>| DeviceCounters {
            device: transport.kind().name(),
            values: transport.counters(),
        };
        self.machine.transports.iter().map(of).collect()
    }

    /// Returns how many bytes of the serial console its rate limit dropped.
    pub fn console_limited_bytes(&self) -> u64 {
        self.machine.console.limited_bytes()
    }

    /// Returns the Unix socket that leads into the guest, if it has a vsock device.
    pub fn vsock_path(&self) -> Option<&Path> {
        self.machine.resources.vsock_path.as_deref()
    }

    /// Returns the tap of each network card, by the name of its interface on the host.
    pub fn taps(&self) -> &[String] {
        &self.machine.resources.taps
    }

    /// Takes the listener for the agent's ready signal, for a caller with an event loop.
    pub fn take_ready(&mut self) -> Option<ReadyListener> {
        self.machine.resources.ready.take()
    }

    /// Connects to the agent in the guest. The first call waits until the agent is ready.
    pub fn agent(&mut self, deadline: Instant) -> Result<Agent, Error> {
        let resources = &mut self.machine.resources;
        if let Some(ready) = &resources.ready {
            ready.wait(deadline)?;
            resources.ready = None;
        }
        let Some(path) = &resources.vsock_path else {
            let act = "vsock: the machine has none, and the agent is reached through it";
            return Err(Error::plain(ErrorKind::InvalidConfig, act));
        };
        Ok(Agent::connect(path, deadline)?)
    }

    /// Reads the size of drive `index` again, after its image grew or shrank, and notifies the
    /// guest.
    pub fn resize_drive(&self, index: usize) -> Result<(), Error> {
        drives::resize(&self.machine, index)
    }

    /// Puts another image behind drive `index`, with the access that the first one had, and
    /// notifies the guest of its size. Requests under way end on the old image, later ones go to
    /// the new one. The guest's own caches of the old image are not touched. If `source` is the
    /// image that is there already, only its size is read again.
    pub fn replace_drive(&mut self, index: usize, source: DriveSource) -> Result<(), Error> {
        drives::replace(&mut self.machine, index, source)
    }

    /// Sets the rate limits of drive `index`.
    pub fn limit_drive(&self, index: usize, limits: RateLimiterConfig) -> Result<(), Error> {
        drives::limit(&self.machine, index, limits)
    }

    /// Replaces the content of the metadata service of all network cards. Returns how many cards
    /// have the service. A snapshot does not keep the content.
    pub fn set_metadata(&self, content: &Arc<Value>) -> Result<usize, Error> {
        nets::set_metadata(&self.machine, content)
    }

    /// Sets the rate limits of network card `index`; `None` keeps the limit of that direction.
    pub fn limit_net(
        &self,
        index: usize,
        rx: Option<RateLimiterConfig>,
        tx: Option<RateLimiterConfig>,
    ) -> Result<(), Error> {
        nets::limit(&self.machine, index, rx, tx)
    }

    /// Asks the guest to give up `target_mib`, or to take back what it gave up beyond that. The
    /// guest follows in its own time; [`Self::balloon_stats`] says how far it is.
    pub fn set_balloon(&self, target_mib: u64) -> Result<(), Error> {
        balloon::set_target(&self.machine, target_mib)
    }

    /// Asks the guest for its memory statistics and waits up to `timeout`. Target and actual size
    /// are the host's figures, all others are the guest's claims.
    pub fn balloon_stats(&self, timeout: Duration) -> Result<BalloonStats, Error> {
        balloon::stats(&self.machine, timeout)
    }

    /// Asks the guest for its free pages, which are released as it names them;
    /// [`Hinting::released`] says when it has named all. Call [`Self::end_hinting`] afterwards:
    /// until then the guest does not use those pages.
    pub fn begin_hinting(&self) -> Result<Hinting, Error> {
        balloon::begin_hinting(&self.machine)
    }

    /// Lets the guest use the pages again that it named since [`Self::begin_hinting`].
    pub fn end_hinting(&self) -> Result<(), Error> {
        balloon::end_hinting(&self.machine)
    }

    /// Asks the guest for its free pages, releases them, and waits up to `timeout` until it has
    /// named all. Returns the number of bytes released. Call it while the workload rests: a page
    /// that a guest short of memory takes back at the same moment may lose its contents.
    pub fn hint_free_pages(&self, timeout: Duration) -> Result<u64, Error> {
        balloon::hint_free_pages(&self.machine, timeout)
    }
}

impl Refresh {
    /// Sets the guest's clock by the counter of `vm`, so that the time that the refresh takes to
    /// reach the guest does not make the clock late. For a VM that was just resumed.
    pub fn clock_of(self, vm: &Vm) -> Self {
        self.clock_mark(vm.machine.clock_mark)
    }
}
