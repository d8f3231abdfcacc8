//! A machine that stands still: what a snapshot holds, decoded and mapped once, ready to be lived by many.
//!
//! `Vm::freeze` makes one of a running machine, `Template::load` one of a folder; forking, rolling back and
//! writing a snapshot all start from here.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::config::{BucketConfig, Console, Drive, Net, RateLimiterConfig, ThreadNames, Vsock};
use crate::error::Error;
use crate::kvm::vm::KvmHost;
use crate::memory::{Lessons, MemoryImage, WorkingSet};
use crate::refresh::Forked;
use crate::restore;
use crate::snapshot::Base;
use crate::snapshot::state::MachineState;
use crate::storage::FrozenStorage;
use crate::vm::{Vm, next_trim};

/// A machine at one instant, from which any number of machines can go on.
pub struct Template {
    pub(crate) host: Arc<KvmHost>,
    pub(crate) machine: Arc<MachineState>,
    pub(crate) image: MemoryImage,
    pub(crate) drives: Vec<FrozenStorage>,
    /// The interfaces that the network cards were connected to.
    pub(crate) taps: Vec<String>,
    pub(crate) vsock_path: Option<PathBuf>,
    /// The snapshot that the lowest layer of the image is the memory of.
    pub(crate) base: Option<Base>,
    /// What a first use touches, if that was recorded.
    pub(crate) working_set: Option<Arc<WorkingSet>>,
    /// Where that is a guess: what the first machine shows to be missing in it.
    pub(crate) lessons: Option<Lessons>,
    /// The memory was left where it is; machines must get theirs from a page server.
    pub(crate) without_memory: bool,
    /// What the caller left in the snapshot for itself.
    pub(crate) note: Vec<u8>,
    /// The sums of the memory, if it came from two files.
    pub(crate) memory_sums: Option<Arc<[u32]>>,
    pub(crate) pause: Duration,
}

/// What a machine gets that its template cannot give it.
#[derive(Debug, Default)]
pub struct Overrides {
    /// Its own socket; without one it takes the template's, which only one machine at a time can have.
    pub vsock: Option<Vsock>,
    /// Other drives, by their place in the template.
    pub drives: Vec<(usize, Drive)>,
    /// Other taps and addresses, by their place; without one a card takes the interface of the template's
    /// name.
    pub nets: Vec<(usize, Net)>,
    /// What the guest may take from the entropy device per time.
    pub rng_limits: RateLimiterConfig,
    pub console: Console,
    /// As in [`crate::VmConfig`].
    pub console_limit: Option<BucketConfig>,
    /// As in [`crate::VmConfig`].
    pub scratch_dir: Option<PathBuf>,
    /// As in [`crate::VmConfig`].
    pub scratch_in_memory: bool,
    /// As in [`crate::VmConfig`].
    pub track_changes: bool,
    pub prefault: Prefault,
    /// Move the guest's clock on by the time that it did not run, instead of hiding that from it: timers that
    /// have run out meanwhile fire at once.
    pub catch_up: bool,
    /// How its vCPU threads are called.
    pub vcpu_threads: ThreadNames,
    /// As in [`crate::VmConfig`]; of memory that comes from a file only what the guest writes can be so.
    pub huge_pages: bool,
    /// The socket of a process that supplies the memory; see [`Template::fork`].
    pub page_server: Option<PathBuf>,
}

/// What is made ready of a template's working set before the machine runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefault {
    /// Each page when it is touched.
    Nothing,
    /// The pages, in this process.
    Mapped,
    /// The pages, and their places in KVM's tables where it can do that.
    #[default]
    InKvm,
}

/// How much a recorded first use touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touched {
    pub written_bytes: u64,
    pub read_bytes: u64,
}

impl Template {
    /// A machine that goes on where the template stands, paused. Nothing is read, parsed or copied. It is
    /// handed out by [`Forked::refreshed`], or as it is by [`Forked::without_refresh`].
    ///
    /// With a page server in `overrides` its memory comes from there: the server gets one message, a JSON
    /// array of ranges with the userfaultfd beside it, and must serve before this returns. If the server
    /// ends, so does the machine, with [`crate::Outcome::MemoryLost`]; it cannot be frozen.
    pub fn fork(&self, overrides: Overrides) -> Result<Forked, Error> {
        restore::restore(self, overrides).map(Forked::new)
    }

    /// Finds out which pages a machine's first use touches, by letting one live it: `first_use` gets a paused
    /// machine and does what users will do first. Machines made from here on have those pages ready, and share what they
    /// then have in common with this one when they are trimmed; a snapshot that is written from here on remembers both. The
    /// machine is left alone for eight seconds at the end.
    pub fn record_working_set<E: From<Error>>(
        &mut self,
        overrides: Overrides,
        first_use: impl FnOnce(&mut Vm) -> Result<(), E>,
    ) -> Result<Touched, E> {
        let overrides = Overrides { prefault: Prefault::Nothing, ..overrides };
        let mut vm = self.fork(overrides)?.without_refresh();
        vm.memory.go_private().map_err(Error::from)?;
        let each_page = vm.memory.report_each_page();
        first_use(&mut vm)?;
        vm.pause()?;
        let touched = vm.memory.touched().map_err(Error::from)?;
        drop(each_page);
        vm.resume()?;
        // It is then what others are when they are trimmed.
        thread::sleep(next_trim(Duration::ZERO));
        vm.pause()?;
        self.image = vm.memory.keep_beside(&self.image).map_err(Error::from)?;
        let (written_bytes, read_bytes) = (touched.written.bytes(), touched.read.bytes());
        self.working_set = Some(Arc::new(touched));
        self.lessons = None;
        Ok(Touched { written_bytes, read_bytes })
    }

    /// How long the machine stood still to become this template.
    pub fn pause(&self) -> Duration {
        self.pause
    }

    /// What [`Vm::save_files`] was given to keep; nothing in a template that came another way.
    pub fn note(&self) -> &[u8] {
        &self.note
    }

    /// The interfaces that the network cards were connected to, in the order of the cards.
    pub fn taps(&self) -> &[String] {
        &self.taps
    }

    pub fn vcpus(&self) -> usize {
        self.machine.vcpus.len()
    }

    pub fn memory_mib(&self) -> u64 {
        self.image.size() >> 20
    }
}
