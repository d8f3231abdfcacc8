//! The parts of a machine and the order in which they must come together.
//!
//! `boot.rs` walks through these steps; whoever brings a machine to life another way walks through the
//! same ones, so the order has one home.

use std::io::{self, Write};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pvmm_devices::GuestMemory;
use pvmm_devices::bus::BusError;
use pvmm_devices::ioapic::{self, Ioapic};
use pvmm_devices::legacy::console::{Console, ConsoleConfig};
use pvmm_devices::legacy::i8042::{self, I8042};
use pvmm_devices::legacy::power::{self, PowerEvent, PowerRegisters, PowerSink};
use pvmm_devices::legacy::serial::{self, Serial};
use pvmm_devices::virtio::VirtioDevice;
use pvmm_devices::virtio::mmio::{MmioTransport, offset};
use pvmm_devices::virtio::thread::DeviceThread;
use pvmm_devices::vmgenid::VmGenId;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::arch::x86_64::layout;
use crate::arch::x86_64::tables::MmioDevice;
use crate::kvm::routes::KvmRoutes;
use crate::kvm::vm::{KvmError, KvmVm};
use crate::sys;
use crate::vcpu::run::{Buses, Outcome};
use crate::vcpu::thread::Report;

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
pub const MAX_VIRTIO: usize = ioapic::PINS - layout::FIRST_VIRTIO_GSI as usize;

/// A machine whose devices are being put in place. Its vCPUs exist already, for they must come first.
pub struct Machine {
    pub buses: Buses,
    pub console: Console,
    pub devices: DeviceThread,
    pub transports: Vec<Arc<MmioTransport>>,
    pub generation: VmGenId,
    pub ending: Arc<Ending>,
}

impl Machine {
    /// Interrupt controller, serial port, power and reset registers, the generation identifier, and the
    /// thread for the rest.
    pub fn new(
        kvm: &KvmVm,
        generation: VmGenId,
        output: Box<dyn Write + Send>,
    ) -> Result<Self, MachineError> {
        let mut buses = Buses::default();
        let ending = Arc::new(Ending::new().map_err(MachineError::Event)?);
        let ioapic = Arc::new(Ioapic::new(Box::new(KvmRoutes::new(kvm.fd().clone()))));
        buses.mmio.insert(layout::IOAPIC, ioapic::SIZE, ioapic)?;

        let console =
            Console::spawn(output, ConsoleConfig::default()).map_err(MachineError::Serial)?;
        let serial = Arc::new(Serial::new(console.input()).map_err(MachineError::Serial)?);
        kvm.connect_interrupt(serial.interrupt(), layout::SERIAL_GSI)?;
        buses.ports.insert(layout::SERIAL_PORT.into(), serial::PORTS, serial)?;

        kvm.connect_interrupt(generation.interrupt(), layout::GENERATION_GSI)?;

        let on_power = ending.on_power();
        let reset = Arc::new(I8042::new(on_power.clone()));
        buses.ports.insert(layout::I8042_PORT.into(), i8042::PORTS, reset)?;
        let power = Arc::new(PowerRegisters::new(on_power));
        buses.ports.insert(layout::POWER_PORT.into(), power::PORTS, power)?;

        let devices = DeviceThread::spawn().map_err(MachineError::DeviceThread)?;
        Ok(Self { buses, console, devices, transports: Vec::new(), generation, ending })
    }

    /// Puts a virtio device in the next place and connects its interrupt and its kicks.
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
        let transport = MmioTransport::new(device, memory.clone(), self.devices.handle().clone())
            .map_err(|source| MachineError::Device { kind, source })?;
        let transport = Arc::new(transport);
        kvm.connect_interrupt(transport.interrupt().event(), place.gsi)?;
        for (queue, kick) in transport.queue_kicks().iter().enumerate() {
            kvm.connect_kick(kick, place.address + offset::QUEUE_NOTIFY, queue as u32)?;
        }
        self.buses.mmio.insert(place.address, layout::VIRTIO_MMIO_SIZE, transport.clone())?;
        self.transports.push(transport);
        Ok(())
    }

    /// Where the attached devices are, for the tables that describe them.
    pub fn places(&self) -> Vec<MmioDevice> {
        (0..self.transports.len()).map(place).collect()
    }
}

fn place(index: usize) -> MmioDevice {
    MmioDevice {
        address: layout::VIRTIO_MMIO + index as u64 * layout::VIRTIO_MMIO_SIZE,
        gsi: layout::FIRST_VIRTIO_GSI + index as u32,
    }
}

/// How the machine ended, once it has: written by the first who knows, read by the owner.
pub struct Ending {
    outcome: OnceLock<Outcome>,
    event: EventFd,
}

impl Ending {
    fn new() -> io::Result<Self> {
        Ok(Self { outcome: OnceLock::new(), event: EventFd::new(EFD_NONBLOCK)? })
    }

    /// For the vCPU threads.
    pub fn report(self: &Arc<Self>) -> Report {
        let ending = self.clone();
        Arc::new(move |outcome| ending.set(outcome))
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
        if self.outcome.set(outcome).is_ok() {
            // A fresh counter takes a one; and it is never read, so it stays readable for good.
            let _ = self.event.write(1);
        }
    }

    /// Readable once the machine has ended.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// The outcome, waiting for it up to `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Outcome> {
        if self.outcome.get().is_none() {
            // If polling itself fails there is nothing to wait with; the caller sees "not yet".
            let _ = sys::wait_readable(&self.event, timeout);
        }
        self.outcome.get().cloned()
    }
}
