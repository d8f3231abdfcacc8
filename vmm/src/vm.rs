//! A machine in the owner's hands: resume, pause, wait; dropping it ends it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pvmm_devices::ioapic::Ioapic;
use pvmm_devices::legacy::Serial;
use pvmm_devices::legacy::console::Console;
use pvmm_devices::legacy::i8042::I8042;
use pvmm_devices::virtio::MmioTransport;
pub use pvmm_devices::virtio::counters::CounterValues;
use pvmm_devices::virtio::device_loop::DeviceError;
use pvmm_devices::virtio::thread::{CALL_DEADLINE, DeviceThread};
use pvmm_devices::vmgenid::VmGenId;
use vmm_sys_util::eventfd::EventFd;

use crate::agent::{Agent, ReadyListener};
use crate::boot;
use crate::config::VmConfig;
use crate::error::{Error, ErrorKind};
use crate::kvm::state::ClockMark;
use crate::kvm::vm::KvmVm;
use crate::machine::{Ending, Held, MachineError};
use crate::memory::{Memory, PageServer};
use crate::sys;
use crate::template::Template;
use crate::trace;
use crate::vcpu::run::{Buses, Outcome};
use crate::vcpu::thread::{Preparation, VcpuThread};

/// What one device has counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCounters {
    /// `block`, `net`, `vsock`, …
    pub device: &'static str,
    pub values: CounterValues,
}

/// A virtual machine. Dropping it stops its vCPUs and then its devices.
pub struct Vm {
    // Dropped in this order: nothing may run in the guest when its devices go, and nothing may touch
    // its memory when KVM lets go of it.
    pub(crate) vcpus: Vec<VcpuThread>,
    /// Devices that wait for a page go on when this is gone.
    pub(crate) page_server: Option<PageServer>,
    pub(crate) devices: DeviceThread,
    pub(crate) console: Console,
    pub(crate) buses: Arc<Buses>,
    pub(crate) transports: Vec<Arc<MmioTransport>>,
    pub(crate) ioapic: Arc<Ioapic>,
    pub(crate) serial: Arc<Serial>,
    pub(crate) keyboard: Arc<I8042>,
    pub(crate) generation: VmGenId,
    pub(crate) ending: Arc<Ending>,
    pub(crate) held: Held,
    pub(crate) checkpoint: Option<Template>,
    pub(crate) running: bool,
    /// Why the machine can only be ended, if that is so.
    pub(crate) broken: Option<String>,
    /// What the guest's time stamp counter showed when the machine was last resumed.
    pub(crate) clock_mark: Option<ClockMark>,
    /// Makes the pages of a first use ready. Left until the guest runs: a copy that never does costs no page.
    pub(crate) prefault: Option<Preparation>,
    pub(crate) kvm: KvmVm,
    pub(crate) memory: Memory,
}

/// At what age a copy that is `age` old is best trimmed: when it has done what it was made for at once, and whenever it is
/// twice as old. A guest that has nothing to do still wakes now and then, and writes a little each time.
pub fn next_trim(age: Duration) -> Duration {
    let mut at = Duration::from_secs(8);
    while at <= age {
        at *= 2;
    }
    at
}

impl Vm {
    /// Makes the machine that `config` describes, paused before its first instruction.
    pub fn boot(config: VmConfig) -> Result<Self, Error> {
        boot::boot(config)
    }

    /// Lets the guest run. After an error it does not run, unless the error is of kind [`ErrorKind::Broken`].
    pub fn resume(&mut self) -> Result<(), Error> {
        self.check_whole()?;
        if !self.running {
            self.mark_clock();
            // All of them before any runs: a machine runs as a whole or not at all.
            self.vcpus.iter_mut().try_for_each(VcpuThread::start)?;
            trace::step("vCPU threads");
            self.open_drives()?;
            self.memory.begin_use();
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

    fn run_vcpus(&mut self, mut prefault: Option<Preparation>) -> Result<(), Error> {
        let run = |vcpu: &VcpuThread| vcpu.resume(prefault.take());
        let ran = self.vcpus.iter().map(run).find_map(Result::err);
        ran.map_or(Ok(()), |error| Err(self.break_with(&error.into())))
    }

    /// Takes note of the guest's counter, so that a refresh can tell the guest the time to the instant at which
    /// it reads it.
    fn mark_clock(&mut self) {
        let mark = self.vcpus.first().and_then(|vcpu| vcpu.mark_clock().ok()?.wait().ok());
        self.clock_mark = mark;
    }

    /// Stops the guest: first its vCPUs, all at once, then its devices. When this returns nothing writes
    /// guest memory any more. After an error the machine runs on as a whole, unless the error is of kind
    /// [`ErrorKind::Broken`].
    pub fn pause(&mut self) -> Result<(), Error> {
        self.check_whole()?;
        if let Some(server) = &self.page_server {
            server.check()?;
        }
        if self.running {
            if let Err(error) = self.park() {
                // A vCPU that has not parked yet finds this behind the wish to park, and the devices go on by themselves.
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

    /// Ends a machine whose parts no longer fit together. Every later call that would go on with it is refused.
    pub(crate) fn break_with(&mut self, error: &Error) -> Error {
        let why = self.broken.get_or_insert_with(|| error.to_string());
        self.ending.end_broken(why);
        broken(why)
    }

    fn check_whole(&self) -> Result<(), Error> {
        self.broken.as_ref().map_or(Ok(()), |why| Err(broken(why)))
    }

    /// Gives back memory that the guest does not need of its own: pages that hold what its template holds, or what the
    /// machine held that the template's first use was recorded with. Also what this process's allocator keeps for later, and
    /// the calling thread's stack below this call. For a machine at rest, which it stops for a moment; returns how many bytes
    /// of the guest's that were. [`next_trim`] says when.
    pub fn trim(&mut self) -> Result<u64, Error> {
        if self.page_server.is_some() {
            // A page that is given back would be asked for a second time.
            return Ok(0);
        }
        let was_running = self.running;
        self.pause()?;
        let trimmed = self.memory.trim();
        if was_running {
            self.resume()?;
        }
        sys::trim_heap();
        sys::trim_stack();
        Ok(trimmed?)
    }

    /// How the guest ended, waiting for it up to `timeout`; `None` if it has not.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Outcome> {
        self.ending.wait(timeout)
    }

    /// Readable once the guest has ended, to wait for it beside other things.
    pub fn outcome_event(&self) -> &EventFd {
        self.ending.event()
    }

    /// Types at the guest's serial console: takes what fits and returns how much that was. When it was not all,
    /// wait for [`Self::serial_room`] before offering the rest.
    pub fn type_serial(&self, bytes: &[u8]) -> usize {
        self.serial.feed(bytes)
    }

    /// Presses Ctrl-Alt-Del, by which a guest with a keyboard ([`crate::VmConfig::keyboard`]) and a driver for it
    /// restarts itself.
    pub fn press_ctrl_alt_del(&self) {
        self.keyboard.press_ctrl_alt_del();
    }

    /// Readable when the guest has read from its console and there is room again. Read it empty before typing.
    pub fn serial_room(&self) -> &EventFd {
        self.serial.input_room()
    }

    /// Gives the guest a new generation identifier, as one does with a machine that lives a second time:
    /// its kernel then reseeds its random generator.
    pub fn renew_generation(&self) -> Result<(), Error> {
        Ok(self.generation.renew()?)
    }

    /// How often the guest touched an address or port where nothing is.
    pub fn missed_accesses(&self) -> u64 {
        self.buses.missed()
    }

    /// What each virtio device has counted about its driver, in the guest's order.
    pub fn device_counters(&self) -> Vec<DeviceCounters> {
        let of = |transport: &Arc<MmioTransport>| DeviceCounters {
            device: transport.kind().name(),
            values: transport.counters(),
        };
        self.transports.iter().map(of).collect()
    }

    /// How many bytes of the serial console its limit did not let through.
    pub fn console_limited_bytes(&self) -> u64 {
        self.console.limited_bytes()
    }

    /// The Unix socket that leads into the guest, if it has a vsock device.
    pub fn vsock_path(&self) -> Option<&Path> {
        self.held.vsock_path.as_deref()
    }

    /// The host's end of each network card, by the name of its interface.
    pub fn taps(&self) -> &[String] {
        &self.held.taps
    }

    /// What hears the agent's ready signal, for those who wait for it beside other things.
    pub fn take_ready(&mut self) -> Option<ReadyListener> {
        self.held.ready.take()
    }

    /// A connection to the agent in the guest; the first call waits until the agent is ready.
    pub fn agent(&mut self, deadline: Instant) -> Result<Agent, Error> {
        if let Some(ready) = &self.held.ready {
            ready.wait(deadline)?;
            self.held.ready = None;
        }
        let Some(path) = &self.held.vsock_path else {
            let act = "vsock: the machine has none, and the agent is reached through it";
            return Err(Error::plain(ErrorKind::InvalidConfig, act));
        };
        Ok(Agent::connect(path, deadline)?)
    }
}

fn broken(why: &str) -> Error {
    let act = format!("the machine is broken and can only be ended: {why}");
    Error::plain(ErrorKind::Broken, act)
}
