//! Puts the parts of a machine together, in the order that KVM and the devices need.
//!
//! `boot.rs` and `restore.rs` both go through these steps.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use kvm_ioctls::VcpuFd;
use pvmm_devices::GuestMemory;
use pvmm_devices::ioapic::{self, Ioapic};
use pvmm_devices::legacy::console::{self, ConsoleConfig};
use pvmm_devices::legacy::i8042::{self, I8042};
use pvmm_devices::legacy::power::{self, PowerRegisters};
use pvmm_devices::legacy::serial::{self, Serial};
use pvmm_devices::virtio::VirtioDevice;
use pvmm_devices::virtio::mmio::{MmioTransport, offset};
use pvmm_devices::virtio::registry::{BackendHandle, DeviceKind};
use pvmm_devices::virtio::thread::DeviceThread;
use pvmm_devices::vmgenid::VmGenId;

use super::{Ending, MAX_VIRTIO, Machine, MachineError, VmResources};
use crate::ablation::Mechanism;
use crate::arch::x86_64::layout;
use crate::arch::x86_64::tables::MmioDevice;
use crate::config::{BucketConfig, Console};
use crate::error::Error;
use crate::kvm::vm::KvmVm;
use crate::memory::Memory;
use crate::storage::{AttachedDrive, Storage};
use crate::thread_filters;
use crate::vcpu::run::Buses;
use crate::vcpu::thread::VcpuThread;

/// The backends of the devices of a machine, opened before anything is made.
#[derive(Default)]
pub struct Opened {
    /// In the order in which the guest numbers them.
    pub devices: Vec<Box<dyn VirtioDevice>>,
    pub drives: Vec<AttachedDrive>,
    /// The interfaces on the host that the network cards are connected to.
    pub taps: Vec<String>,
    pub vsock_path: Option<PathBuf>,
}

impl Opened {
    /// Adds a device and keeps the handle of its backend; `storage` is that of a drive.
    pub fn add(&mut self, device: Box<dyn VirtioDevice>, storage: Option<Storage>) {
        match (device.backend(), storage) {
            (BackendHandle::Disk(handle), Some(storage)) => {
                self.drives.push(AttachedDrive::new(handle, storage));
            }
            (BackendHandle::Tap(name), _) => self.taps.push(name),
            (BackendHandle::Socket(path), _) => self.vsock_path = Some(path),
            (BackendHandle::Disk(_) | BackendHandle::None, _) => {}
        }
        self.devices.push(device);
    }

    /// Returns how many devices of this kind there are.
    pub fn count(&self, kind: DeviceKind) -> usize {
        self.devices.iter().filter(|device| device.kind() == kind).count()
    }
}

/// A machine that devices are being attached to. KVM's vCPUs must have been created before.
pub struct MachineBuilder {
    pub buses: Buses,
    pub console: console::Console,
    pub devices: DeviceThread,
    pub transports: Vec<Arc<MmioTransport>>,
    pub ioapic: Arc<Ioapic>,
    pub serial: Arc<Serial>,
    pub keyboard: Arc<I8042>,
    pub generation: VmGenId,
    pub ending: Arc<Ending>,
}

impl MachineBuilder {
    /// Interrupt controller, serial port, power and reset registers, the generation identifier, and
    /// the thread for the rest.
    pub fn new(
        kvm: &KvmVm,
        memory: &GuestMemory,
        console: console::Console,
    ) -> Result<Self, MachineError> {
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
    pub fn finish(
        mut self,
        vcpus: Vec<VcpuFd>,
        kvm: KvmVm,
        memory: Memory,
        resources: VmResources,
    ) -> Result<Machine, Error> {
        if let Some(vsock) = self.transports.iter().find(|it| it.kind() == DeviceKind::Vsock) {
            let vsock = vsock.clone();
            self.ending.then(Box::new(move || vsock.abandon()));
        }
        let buses = Arc::new(self.buses);
        let report = self.ending.report();
        let filters = resources.thread_filters.as_ref();
        self.devices.enter_with(thread_filters::entry(filters, |all| &all.devices, &report));
        let entry = thread_filters::entry(filters, |all| &all.vcpu, &report);
        let thread = |(id, vcpu)| {
            let name = format!("{}{id}", resources.vcpu_thread_prefix);
            let (shape, buses) = (kvm.shape().clone(), buses.clone());
            VcpuThread::new(id, name, vcpu, shape, buses, report.clone(), entry.clone())
        };
        let mut vcpus = (0..).zip(vcpus).map(thread).collect::<Result<Vec<_>, _>>()?;
        if !Mechanism::LateThreads.in_use() {
            vcpus.iter_mut().try_for_each(VcpuThread::start)?;
            self.devices.start().map_err(MachineError::DeviceThread)?;
        }
        Ok(Machine {
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
            resources,
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

fn place(index: usize) -> MmioDevice {
    MmioDevice {
        address: layout::VIRTIO_MMIO + index as u64 * layout::VIRTIO_MMIO_SIZE,
        gsi: layout::FIRST_VIRTIO_GSI + index as u32,
    }
}

/// The device's end of the console, which holds the guest to `limit`.
pub fn open_console(to: Console, limit: Option<BucketConfig>) -> console::Console {
    let target: Box<dyn Write + Send> = match to {
        Console::Discard => Box::new(io::sink()),
        Console::Stdout => Box::new(io::stdout()),
        Console::File(file) => Box::new(file),
    };
    console::Console::new(target, ConsoleConfig { limit, ..ConsoleConfig::default() })
}
