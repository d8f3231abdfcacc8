//! The parts of a machine and the order in which they must come together.
//!
//! `boot.rs` walks through these steps; whoever brings a machine to life another way walks through the
//! same ones, so the order has one home.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kvm_ioctls::VcpuFd;
use pvmm_devices::GuestMemory;
use pvmm_devices::bus::BusError;
use pvmm_devices::ioapic::{self, Ioapic};
use pvmm_devices::legacy::console::Console;
use pvmm_devices::legacy::i8042::{self, I8042};
use pvmm_devices::legacy::power::{self, PowerEvent, PowerRegisters, PowerSink};
use pvmm_devices::legacy::serial::{self, Serial};
use pvmm_devices::lines::PINS;
use pvmm_devices::virtio::VirtioDevice;
use pvmm_devices::virtio::block::Block;
use pvmm_devices::virtio::mmio::{MmioTransport, offset};
use pvmm_devices::virtio::net::Net;
use pvmm_devices::virtio::registry::DeviceKind;
use pvmm_devices::virtio::thread::DeviceThread;
use pvmm_devices::vmgenid::VmGenId;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::agent::ReadyListener;
use crate::arch::x86_64::layout;
use crate::arch::x86_64::tables::MmioDevice;
use crate::config::ThreadNames;
use crate::drives::HeldDrive;
use crate::error::Error;
use crate::kvm::vm::{KvmError, KvmVm};
use crate::memory::{First, Memory, WorkingSet};
use crate::scratch::Scratch;
use crate::snapshot::Base;
use crate::sys;
use crate::vcpu::run::{Buses, Outcome};
use crate::vcpu::thread::{Report, VcpuThread};
use crate::vm::Vm;

/// What kept the parts from coming together.
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

/// As many virtio devices as there are interrupt lines left for them.
pub const MAX_VIRTIO: usize = PINS - layout::FIRST_VIRTIO_GSI as usize;

/// A machine whose devices are being put in place. Its vCPUs exist already, for they must come first.
pub struct Machine {
    pub buses: Buses,
    pub console: Console,
    pub devices: DeviceThread,
    pub transports: Vec<Arc<MmioTransport>>,
    pub ioapic: Arc<Ioapic>,
    pub serial: Arc<Serial>,
    pub keyboard: Arc<I8042>,
    pub generation: VmGenId,
    pub ending: Arc<Ending>,
}

impl Machine {
    /// Interrupt controller, serial port, power and reset registers, the generation identifier, and the
    /// thread for the rest.
    pub fn new(kvm: &KvmVm, memory: &GuestMemory, console: Console) -> Result<Self, MachineError> {
        let mut buses = Buses::default();
        let ending = Arc::new(Ending::new().map_err(MachineError::Event)?);
        let ioapic = Arc::new(Ioapic::new(kvm.deliver()));
        buses.mmio.insert(layout::IOAPIC, ioapic::SIZE, ioapic.clone())?;

        let serial = Serial::new(console.input(), ioapic.line(layout::SERIAL_GSI));
        let serial = Arc::new(serial.map_err(MachineError::Serial)?);
        buses.ports.insert(layout::SERIAL_PORT.into(), serial::PORTS, serial.clone())?;

        let line = ioapic.line(layout::GENERATION_GSI);
        let generation = VmGenId::new(memory, layout::GENERATION, line);

        let on_power = ending.on_power();
        let keyboard = I8042::new(on_power.clone(), ioapic.line(layout::KEYBOARD_GSI));
        let keyboard = Arc::new(keyboard);
        buses.ports.insert(layout::I8042_PORT.into(), i8042::PORTS, keyboard.clone())?;
        let power = Arc::new(PowerRegisters::new(on_power));
        buses.ports.insert(layout::POWER_PORT.into(), power::PORTS, power)?;

        let devices = DeviceThread::new().map_err(MachineError::DeviceThread)?;
        let transports = Vec::new();
        Ok(Self {
            buses,
            console,
            devices,
            transports,
            ioapic,
            serial,
            keyboard,
            generation,
            ending,
        })
    }

    /// Puts a virtio device in the next place. Its kicks are connected once they are many.
    pub fn attach(
        &mut self,
        device: Box<dyn VirtioDevice>,
        kvm: &KvmVm,
        memory: &GuestMemory,
    ) -> Result<(), MachineError> {
        let index = self.transports.len();
        if index >= MAX_VIRTIO {
            return Err(MachineError::TooManyDevices);
        }
        let place = place(index);
        let kind = device.kind().name();
        let kicks = Box::new(kvm.kicks_at(place.address + offset::QUEUE_NOTIFY));
        let thread = self.devices.handle().clone();
        let line = self.ioapic.line(place.gsi);
        let transport = MmioTransport::new(device, memory.clone(), thread, kicks, line)
            .map_err(|source| MachineError::Device { kind, source })?;
        let transport = Arc::new(transport);
        self.buses.mmio.insert(place.address, layout::VIRTIO_MMIO_SIZE, transport.clone())?;
        self.transports.push(transport);
        Ok(())
    }

    /// Hands the machine to its owner. Its threads start when it first runs.
    pub fn start(
        self,
        vcpus: Vec<VcpuFd>,
        kvm: KvmVm,
        memory: Memory,
        held: Held,
    ) -> Result<Vm, Error> {
        if let Some(vsock) = self.transports.iter().find(|it| it.kind() == DeviceKind::Vsock) {
            let vsock = vsock.clone();
            self.ending.then(Box::new(move || vsock.abandon()));
        }
        let buses = Arc::new(self.buses);
        let report = self.ending.report();
        let thread = |(id, vcpu)| {
            let name = held.vcpu_threads.vcpu(id);
            VcpuThread::new(id, name, vcpu, kvm.shape().clone(), buses.clone(), report.clone())
        };
        let vcpus = (0..).zip(vcpus).map(thread).collect::<Result<Vec<_>, _>>()?;
        Ok(Vm {
            vcpus,
            devices: self.devices,
            console: self.console,
            buses,
            transports: self.transports,
            ioapic: self.ioapic,
            serial: self.serial,
            keyboard: self.keyboard,
            generation: self.generation,
            ending: self.ending,
            held,
            checkpoint: None,
            running: false,
            broken: None,
            clock_mark: None,
            prefault: None,
            page_server: None,
            kvm,
            memory,
        })
    }

    /// Where the attached devices are, for the tables that describe them.
    pub fn places(&self) -> Vec<MmioDevice> {
        (0..self.transports.len()).map(place).collect()
    }
}

/// What stands behind the devices of a machine, opened before anything is made.
#[derive(Default)]
pub struct Opened {
    /// In the order in which the guest numbers them.
    pub devices: Vec<Box<dyn VirtioDevice>>,
    pub drives: Vec<HeldDrive>,
    /// The interfaces on the host that the network cards are connected to.
    pub taps: Vec<String>,
    pub vsock_path: Option<PathBuf>,
}

impl Opened {
    pub fn add_drive(&mut self, (block, held): (Block, HeldDrive)) {
        self.devices.push(Box::new(block));
        self.drives.push(held);
    }

    pub fn add_net(&mut self, net: Net) {
        self.taps.push(net.tap_name().to_owned());
        self.devices.push(Box::new(net));
    }
}

/// What the owner keeps beside the machine itself.
pub struct Held {
    /// In the guest's order; their transports are the first ones.
    pub drives: Vec<HeldDrive>,
    pub taps: Vec<String>,
    pub scratch: Scratch,
    pub vsock_path: Option<PathBuf>,
    /// There until the agent has said that it is ready.
    pub ready: Option<ReadyListener>,
    /// The snapshot that the machine's memory lies over.
    pub base: Option<Base>,
    /// What a first use of the template touched.
    pub working_set: Option<Arc<WorkingSet>>,
    /// There if the template's other machines learn from this one.
    pub _first: Option<First>,
    /// Whether a save as two files is followed by others that hold only what changed.
    pub track_changes: bool,
    /// The sums of all memory at the last save as two files, or at the load from them.
    pub memory_sums: Option<Arc<[u32]>>,
    /// The rate of the clock that the guest was booted with, if that was before this machine.
    pub clock_khz: Option<u32>,
    pub vcpu_threads: ThreadNames,
}

fn place(index: usize) -> MmioDevice {
    MmioDevice {
        address: layout::VIRTIO_MMIO + index as u64 * layout::VIRTIO_MMIO_SIZE,
        gsi: layout::FIRST_VIRTIO_GSI + index as u32,
    }
}

/// How the machine ended, once it has: written by the first who knows, read by the owner.
pub struct Ending {
    outcome: Mutex<Option<Outcome>>,
    event: EventFd,
    then: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Ending {
    fn new() -> io::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK)?;
        Ok(Self { outcome: Mutex::new(None), event, then: OnceLock::new() })
    }

    /// What the thread that sees the end does then: nobody should wait for a guest that is no more.
    fn then(&self, act: Box<dyn Fn() + Send + Sync>) {
        // A machine is started once.
        let _ = self.then.set(act);
    }

    fn outcome(&self) -> MutexGuard<'_, Option<Outcome>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machine lives again: it was taken back to before its end.
    pub fn forget(&self) {
        let mut outcome = self.outcome();
        *outcome = None;
        // Nothing was written if the machine had not ended.
        let _ = self.event.read();
    }

    /// For the vCPU threads.
    pub fn report(self: &Arc<Self>) -> Report {
        let ending = self.clone();
        Arc::new(move |outcome| ending.set(outcome))
    }

    /// The machine can no longer go on: an earlier end does not matter any more.
    pub fn end_broken(&self, why: &str) {
        self.forget();
        self.set(Outcome::Broken { why: why.to_owned() });
    }

    fn on_power(self: &Arc<Self>) -> PowerSink {
        let ending = self.clone();
        Arc::new(move |event| {
            ending.set(match event {
                PowerEvent::Poweroff => Outcome::Poweroff,
                PowerEvent::Reset => Outcome::Reboot,
            });
        })
    }

    fn set(&self, outcome: Outcome) {
        let mut first = self.outcome();
        if first.is_some() {
            return;
        }
        // Devices of a machine without memory may not answer until its owner lets go of it.
        let answers = outcome != Outcome::MemoryLost;
        *first = Some(outcome);
        // A fresh counter takes a one; and it is only read by `forget`, so it stays readable.
        let _ = self.event.write(1);
        drop(first);
        if let Some(then) = self.then.get().filter(|_| answers) {
            then();
        }
    }

    /// Readable once the machine has ended.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// The outcome, waiting for it up to `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Outcome> {
        if self.outcome().is_none() {
            // If polling itself fails there is nothing to wait with; the caller sees "not yet".
            let _ = sys::wait_readable(&self.event, timeout);
        }
        self.outcome().clone()
    }
}
