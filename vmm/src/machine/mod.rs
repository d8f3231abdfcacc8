//! The parts of a running machine and what every recipe needs of them: resume, pause, the end.
//!
//! | file | what it holds |
//! | --- | --- |
//! | `builder.rs` | the order in which the parts come together |
//! | `drives.rs`, `nets.rs`, `balloon.rs` | what can be changed about the devices of a machine |
//! | `ending.rs` | how the machine ended |

pub mod balloon;
mod builder;
pub mod drives;
mod ending;
pub mod nets;

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use pvmm_devices::bus::BusError;
use pvmm_devices::ioapic::Ioapic;
use pvmm_devices::legacy::Serial;
use pvmm_devices::legacy::console::Console;
use pvmm_devices::legacy::i8042::I8042;
use pvmm_devices::lines::PINS;
use pvmm_devices::virtio::MmioTransport;
use pvmm_devices::virtio::device_loop::DeviceError;
use pvmm_devices::virtio::thread::{CALL_DEADLINE, DeviceThread};
use pvmm_devices::vmgenid::VmGenId;

pub use balloon::Hinting;
pub use builder::{MachineBuilder, Opened, open_console};
pub use ending::Ending;

use crate::agent::ReadyListener;
use crate::arch::x86_64::layout;
use crate::cpu::CpuBaseline;
use crate::error::{Error, ErrorKind};
use crate::frozen::{Base, Frozen};
use crate::kvm::state::ClockMark;
use crate::kvm::vm::{KvmError, KvmVm};
use crate::memory::{Memory, PageServer, WorkingSet};
use crate::scratch::Scratch;
use crate::storage::AttachedDrive;
use crate::thread_filters::{self, ThreadFilters};
use crate::trace;
use crate::vcpu::run::Buses;
use crate::vcpu::thread::{Preparation, VcpuThread};

/// Why a machine could not be built.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    #[error("cannot start the device thread")]
    DeviceThread(#[source] io::Error),
    #[error("cannot make an event descriptor")]
    Event(#[source] io::Error),
    #[error("cannot start the serial console")]
    Serial(#[source] io::Error),
    #[error("cannot make the {kind} device")]
    Device { kind: &'static str, source: io::Error },
    #[error("a machine has room for {max} devices", max = MAX_VIRTIO)]
    TooManyDevices,
    #[error("cannot place a device")]
    Bus(#[from] BusError),
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

impl MachineError {
    /// Returns whose fault the error is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Kvm(error) => error.kind(),
            Self::TooManyDevices => ErrorKind::InvalidConfig,
            Self::Bus(_) => ErrorKind::Bug,
            Self::DeviceThread(_) | Self::Event(_) | Self::Serial(_) | Self::Device { .. } => {
                ErrorKind::HostResource
            }
        }
    }
}

impl From<MachineError> for Error {
    fn from(error: MachineError) -> Self {
        match error {
            MachineError::Kvm(error) => error.into(),
            error => Self::new(error.kind(), "cannot build the machine", error),
        }
    }
}

/// The most virtio devices of a machine: as many as there are interrupt lines left for them.
pub const MAX_VIRTIO: usize = PINS - layout::FIRST_VIRTIO_GSI as usize;

/// The resources of a machine besides its parts: drives, sockets, and where its memory came from.
pub struct VmResources {
    /// In the guest's order; their transports are the first ones.
    pub drives: Vec<AttachedDrive>,
    pub taps: Vec<String>,
    pub scratch: Scratch,
    pub vsock_path: Option<PathBuf>,
    /// There until the agent has said that it is ready.
    pub ready: Option<ReadyListener>,
    /// The snapshot that the machine's memory lies over.
    pub base: Option<Base>,
    /// The pages that a first use of the template touched.
    pub working_set: Option<Arc<WorkingSet>>,
    /// Whether a save as two files is followed by others that hold only what changed.
    pub track_changes: bool,
    /// The sums of all memory at the last save as two files, or at the load from them.
    pub memory_sums: Option<Arc<[u32]>>,
    /// The rate of the clock that the guest was booted with, if that was before this machine.
    pub clock_khz: Option<u32>,
    /// The processor features that the guest was offered at boot.
    pub cpu: CpuBaseline,
    pub vcpu_thread_prefix: Cow<'static, str>,
    pub thread_filters: Option<Arc<ThreadFilters>>,
}

/// A machine and everything that belongs to it. Dropping it stops its vCPUs and then its devices.
pub struct Machine {
    // Dropped in this order: nothing may run in the guest when its devices go, and nothing may
    // touch its memory when KVM lets go of it.
    pub vcpus: Vec<VcpuThread>,
    /// Devices that wait for a page go on when this is gone.
    pub page_server: Option<PageServer>,
    pub devices: DeviceThread,
    pub console: Console,
    pub buses: Arc<Buses>,
    pub transports: Vec<Arc<MmioTransport>>,
    pub ioapic: Arc<Ioapic>,
    pub serial: Arc<Serial>,
    pub keyboard: Arc<I8042>,
    pub generation: VmGenId,
    pub ending: Arc<Ending>,
    pub resources: VmResources,
    pub checkpoint: Option<Frozen>,
    pub running: bool,
    /// Why the machine can only be ended, if that is so.
    pub broken: Option<String>,
    /// The guest's time stamp counter when the machine was last resumed.
    pub clock_mark: Option<ClockMark>,
    /// Makes the pages of a first use ready. Left until the guest runs: a copy that never does
    /// costs no page.
    pub prefault: Option<Preparation>,
    pub kvm: KvmVm,
    pub memory: Memory,
}

impl Machine {
    /// Lets the guest run. After an error it does not run, unless the error is of kind
    /// [`ErrorKind::Broken`].
    pub fn resume(&mut self) -> Result<(), Error> {
        self.check_whole()?;
        if !self.running {
            self.mark_clock();
            // All of them before any runs: a machine runs as a whole or not at all.
            self.vcpus.iter_mut().try_for_each(VcpuThread::start)?;
            self.start_console()?;
            trace::step("vCPU threads");
            drives::open_deferred(self)?;
            self.devices.handle().resume_all()?;
            if let Err(error) = self.devices.start() {
                self.devices.handle().quiesce_all()?;
                return Err(MachineError::DeviceThread(error).into());
            }
            trace::step("resume devices");
            // The first vCPU makes the pages of a first use ready.
            let prefault = self.prefault.take();
            self.run_vcpus(prefault)?;
            trace::step("resume vCPUs");
            self.running = true;
        }
        Ok(())
    }

    /// Starts the thread of the console if the VM is confined: its vCPUs cannot start one.
    fn start_console(&self) -> Result<(), MachineError> {
        let filters = self.resources.thread_filters.as_ref();
        let entry = thread_filters::entry(filters, |all| &all.console, &self.ending.report());
        entry.map_or(Ok(()), |entry| self.console.start(entry)).map_err(MachineError::Serial)
    }

    fn run_vcpus(&mut self, mut prefault: Option<Preparation>) -> Result<(), Error> {
        let run = |vcpu: &VcpuThread| vcpu.resume(prefault.take());
        let ran = self.vcpus.iter().map(run).find_map(Result::err);
        ran.map_or(Ok(()), |error| Err(self.break_with(&error.into())))
    }

    /// Takes note of the guest's counter, so that a refresh can tell the guest the time to the
    /// instant at which it reads it.
    fn mark_clock(&mut self) {
        let mark = self.vcpus.first().and_then(|vcpu| vcpu.mark_clock().ok()?.wait().ok());
        self.clock_mark = mark;
    }

    /// Stops the guest: first its vCPUs, all at once, then its devices. When this returns nothing
    /// writes guest memory any more. After an error the machine runs on as a whole, unless the
    /// error is of kind [`ErrorKind::Broken`].
    pub fn pause(&mut self) -> Result<(), Error> {
        self.check_whole()?;
        if let Some(server) = &self.page_server {
            server.check()?;
        }
        if self.running {
            if let Err(error) = self.park() {
                // A vCPU that has not parked yet finds this behind the wish to park, and the
                // devices go on by themselves.
                self.run_vcpus(None)?;
                return Err(error);
            }
            self.running = false;
        }
        Ok(())
    }

    fn park(&mut self) -> Result<(), Error> {
        let parked = self.vcpus.iter().map(VcpuThread::pause).collect::<Result<Vec<_>, _>>()?;
        for vcpu in parked {
            vcpu.wait()?;
        }
        trace::step("vCPUs parked");
        match self.devices.rest(CALL_DEADLINE) {
            Err(gone @ DeviceError::Gone) => return Err(self.break_with(&gone.into())),
            rests => rests?,
        }
        trace::step("devices quiet");
        Ok(())
    }

    /// Ends a machine whose parts no longer fit together. Every later call that would go on with it
    /// is refused.
    pub fn break_with(&mut self, error: &Error) -> Error {
        let why = self.broken.get_or_insert_with(|| format!("{error:#}"));
        self.ending.end_broken(why);
        broken(why)
    }

    fn check_whole(&self) -> Result<(), Error> {
        self.broken.as_ref().map_or(Ok(()), |why| Err(broken(why)))
    }
}

fn broken(why: &str) -> Error {
    let act = format!("the machine is broken and can only be ended: {why}");
    Error::plain(ErrorKind::Broken, act)
}
