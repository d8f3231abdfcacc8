//! `Template`: a frozen VM, from which any number of VMs are forked.
//!
//! `Vm::freeze` makes one of a running VM, `Template::load` one of a snapshot. Each method
//! delegates to the recipe of its name.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use pvmm_devices::virtio::registry::DeviceState;

use super::Vm;
use crate::agent::{Agent, Refresh};
use crate::config::{Overrides, Prefault};
use crate::error::{Error, ErrorKind};
use crate::freeze::Unfinished;
use crate::frozen::Frozen;
use crate::kvm::Kvm;
use crate::memory::Adoption;
use crate::restore;
use crate::snapshot::{self, LoadOptions, Manifest, NOTE_MAX, Roots, WriteOptions};

/// A VM at one instant, from which any number of VMs can be forked.
pub struct Template {
    frozen: Frozen,
}

/// A template whose memory may still be copied in the background. Dropping it ends the copy.
pub struct UnfinishedTemplate {
    unfinished: Unfinished,
}

impl UnfinishedTemplate {
    pub(crate) fn new(unfinished: Unfinished) -> Self {
        Self { unfinished }
    }

    /// Waits until all memory is copied, and returns the template.
    pub fn finish(self) -> Result<Template, Error> {
        self.unfinished.finish().map(|frozen| Template { frozen })
    }
}

/// A paused fork whose guest still has the identity of the VM that was frozen.
#[must_use = "a fork runs only once it was refreshed, or taken without a refresh"]
pub struct Forked {
    vm: Vm,
}

impl Forked {
    /// Resumes the fork and has its agent refresh it before the workload goes on.
    ///
    /// The workload waits for the refresh only if the agent had frozen it when the template was
    /// made ([`Agent::freeze`]). A fork that cannot be refreshed by the deadline is ended.
    pub fn refreshed(mut self, refresh: &Refresh, deadline: Instant) -> Result<(Vm, Agent), Error> {
        let agent = self.vm.resume_refreshed(refresh, deadline)?;
        Ok((self.vm, agent))
    }

    /// Returns the fork as it is, paused: for guests without our agent, and for callers who refresh
    /// it themselves. Programs in it may draw the same random numbers as those in every other fork.
    pub fn without_refresh(self) -> Vm {
        self.vm
    }
}

/// How much memory a recorded first use touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touched {
    /// Bytes in the pages that were written.
    pub written_bytes: u64,
    /// Bytes in the pages that were only read, small gaps between them included.
    pub read_bytes: u64,
}

impl Template {
    pub(crate) fn new(frozen: Frozen) -> Self {
        Self { frozen }
    }

    pub(crate) fn frozen(&self) -> &Frozen {
        &self.frozen
    }

    /// Reads the snapshot in the folder `dir`.
    pub fn load(kvm: &Kvm, dir: &Path, options: LoadOptions) -> Result<Self, Error> {
        snapshot::load(kvm, dir, options).map(|frozen| Self { frozen })
    }

    /// Reads the two files that [`Vm::save_files`] has written. Memory is mapped, not read, so the
    /// file must stay as it is while VMs live that were forked from the template; it may be a block
    /// device. Without `memory` every fork must be given a page server.
    ///
    /// Drives are opened when a fork is resumed, at their old paths and in place, unless the fork
    /// was given others.
    pub fn load_files(kvm: &Kvm, state: &Path, memory: Option<&Path>) -> Result<Self, Error> {
        Self::load_files_under(kvm, state, memory, &None)
    }

    /// Reads two files like [`Self::load_files`], where the state file is not trusted to name
    /// drives: drives at paths outside of `roots` must be replaced by overrides.
    pub fn load_files_under(
        kvm: &Kvm,
        state: &Path,
        memory: Option<&Path>,
        roots: &Roots,
    ) -> Result<Self, Error> {
        snapshot::load_files(kvm, state, memory, roots).map(|frozen| Self { frozen })
    }

    /// Reads the working set that [`Vm::keep_working_set`] has written, so that forks have its
    /// pages prefaulted. Returns whether the file has that of this snapshot; otherwise nothing
    /// changes.
    pub fn use_working_set(&mut self, file: &Path) -> bool {
        let Some(sums) = &self.frozen.memory_sums else { return false };
        let size = self.frozen.image.size();
        let set = snapshot::read_working_set(file, sums, size).map(Arc::new);
        let found = set.is_some();
        self.frozen.working_set = set.or(self.frozen.working_set.take());
        found
    }

    /// Returns what [`Vm::adopt`] needs for the VM that this template was frozen from to share the
    /// memory that was copied. The template itself may be gone by then.
    pub fn adoption(&self) -> Adoption {
        Adoption::of(self.frozen.image.clone())
    }

    /// Writes the template as the snapshot folder `dir`.
    pub fn write(&self, dir: &Path, options: WriteOptions) -> Result<Manifest, Error> {
        snapshot::write(&self.frozen, dir, options)
    }

    /// Returns a message and open files from which another process can make this template with
    /// [`Self::take_over`]. No memory is copied.
    pub fn hand_over(&self) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
        snapshot::hand_over(&self.frozen)
    }

    /// Makes the template that another process handed over.
    pub fn take_over(kvm: &Kvm, bytes: &[u8], files: Vec<OwnedFd>) -> Result<Self, Error> {
        snapshot::take_over(kvm, bytes, files).map(|frozen| Self { frozen })
    }

    /// Forks a VM, paused. Nothing is read, parsed or copied. [`Forked::refreshed`] or
    /// [`Forked::without_refresh`] hands it out.
    ///
    /// With a page server in `overrides` guest memory comes from there: the server gets one
    /// message, a JSON array of ranges with the userfaultfd attached, and must serve before this
    /// returns. If the server ends, so does the VM, with [`crate::Outcome::MemoryLost`]; it cannot
    /// be frozen.
    pub fn fork(&self, overrides: Overrides) -> Result<Forked, Error> {
        restore::restore(&self.frozen, overrides).map(|machine| Forked { vm: Vm::new(machine) })
    }

    /// Opens drives, taps and the list of this process's pages for a fork with these overrides, so
    /// that [`Self::fork`] needs none of their paths. Fails as the fork would. A network card that
    /// `overrides` does not name is opened by the fork.
    pub fn open_files(&self, overrides: &mut Overrides) -> Result<(), Error> {
        let mtu = |device: &DeviceState| match device {
            DeviceState::Net(card) => Some(card.mtu),
            _ => None,
        };
        let devices = self.frozen.state.transports.iter().map(|saved| &saved.device);
        overrides.open_files(&devices.filter_map(mtu).collect::<Vec<_>>())
    }

    /// Records the working set of a VM's first use: `first_use` gets a paused fork and does with it
    /// what users will do first. Later forks have those pages prefaulted, and share the pages that
    /// they then have in common with this one when they are trimmed; a snapshot keeps both.
    /// Afterwards the fork runs on for `rest`, which should be the age at which others are trimmed.
    pub fn record_working_set<E: From<Error>>(
        &mut self,
        overrides: Overrides,
        rest: Duration,
        first_use: impl FnOnce(&mut Vm) -> Result<(), E>,
    ) -> Result<Touched, E> {
        let mut overrides = Overrides { prefault: Prefault::Nothing, ..overrides };
        // Small pages, each of which counts by itself.
        overrides.host.track_changes = true;
        let mut vm = self.fork(overrides)?.without_refresh();
        let each_page = vm.machine().memory.without_fault_around();
        first_use(&mut vm)?;
        vm.pause()?;
        let touched = vm.machine().memory.touched().map_err(Error::from)?;
        drop(each_page);
        vm.resume()?;
        thread::sleep(rest);
        vm.pause()?;
        let frozen = &mut self.frozen;
        frozen.image =
            vm.machine().memory.record_dedup_source(&frozen.image).map_err(Error::from)?;
        let (written_bytes, read_bytes) = (touched.written.bytes(), touched.read.bytes());
        frozen.working_set = Some(Arc::new(touched));
        Ok(Touched { written_bytes, read_bytes })
    }

    /// Returns how long the VM was paused to become this template.
    pub fn pause(&self) -> Duration {
        self.frozen.pause
    }

    /// Returns the note that [`Vm::save_files`] or [`Self::set_note`] was given, now or in the
    /// snapshot that the template was loaded from; empty if there is none.
    pub fn note(&self) -> &[u8] {
        &self.frozen.note
    }

    /// Sets what the caller wants to know of the template later, when it is loaded from a folder
    /// that [`Self::write`] wrote. Fails if `note` is longer than [`crate::NOTE_MAX`].
    pub fn set_note(&mut self, note: Vec<u8>) -> Result<(), Error> {
        if note.len() > NOTE_MAX {
            let what = "set_note: the note is longer than 256 KiB";
            return Err(Error::plain(ErrorKind::InvalidConfig, what));
        }
        self.frozen.note = note;
        Ok(())
    }

    /// Returns the interfaces that the network cards were connected to, in the order of the cards.
    pub fn taps(&self) -> &[String] {
        &self.frozen.taps
    }

    /// Returns the number of vCPUs of every fork.
    pub fn vcpus(&self) -> usize {
        self.frozen.state.vcpus.len()
    }

    /// Returns the size of guest memory of every fork, in MiB.
    pub fn memory_mib(&self) -> u64 {
        self.frozen.image.size() >> 20
    }
}
