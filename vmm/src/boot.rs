//! Boot: from a configuration to a machine that is about to run its kernel's first instruction.

use std::io::{self, Write};
use std::sync::Arc;

use pvmm_devices::GuestMemory;
use pvmm_devices::virtio::VirtioDevice;
use pvmm_devices::virtio::balloon::Balloon;
use pvmm_devices::virtio::block::Block;
use pvmm_devices::virtio::net;
use pvmm_devices::virtio::rng::{Rng, RngConfig};
use pvmm_devices::virtio::vsock::{Vsock, VsockConfig};
use pvmm_devices::vmgenid::VmGenId;

use crate::agent::ReadyListener;
use crate::arch::x86_64::{kernel, layout, tables};
use crate::balloon;
use crate::config::{self, Console, VmConfig};
use crate::drives;
use crate::error::{Error, ErrorKind};
use crate::kvm::vcpu;
use crate::kvm::vm::KvmVm;
use crate::machine::Machine;
use crate::vcpu::thread::VcpuThread;
use crate::vm::Vm;

/// Makes the machine that `config` describes, paused before its first instruction.
///
/// Everything the machine will ever open is opened before its threads start.
pub fn boot(config: VmConfig) -> Result<Vm, Error> {
    config.validate()?;

    // What the host must supply.
    let vsock_path = config.vsock.as_ref().map(|vsock| vsock.uds_path.clone());
    let ready = vsock_path.as_deref().map(ReadyListener::bind).transpose()?;
    let blocks = drives::open_all(config.drives)?;
    let drives = blocks.iter().map(Block::handle).collect();
    let nets = open_nets(config.nets)?;
    let taps = nets.iter().map(|net| net.tap_name().to_owned()).collect();
    let mut devices = open_devices(blocks, nets, config.vsock, config.rng)?;
    if let Some(balloon) = config.balloon {
        let config = balloon::device_config(balloon, config.memory_mib);
        devices.push(Box::new(Balloon::new(config)));
    }
    let memory = allocate_memory(config.memory_mib)?;

    // KVM: memory and vCPUs first, then whatever registers on its I/O bus.
    let kvm = KvmVm::new(&memory)?;
    let vcpus = (0..config.vcpus).map(|id| kvm.create_vcpu(id)).collect::<Result<Vec<_>, _>>()?;
    let generation = VmGenId::new(&memory, layout::GENERATION)?;
    let mut machine = Machine::new(&kvm, generation, open_console(config.console))?;
    for device in devices {
        machine.attach(device, &kvm, &memory)?;
    }

    // What the guest finds: tables, kernel, registers.
    let places = machine.places();
    let image = kernel::Image {
        kernel: &config.kernel,
        initrd: config.initrd.as_ref(),
        cmdline: &command_line(&config.cmdline, &places),
        protocol: config.boot_protocol,
        memory_mib: config.memory_mib,
        rsdp: tables::write(config.vcpus, &places, &memory)?,
    };
    let entry = kernel::load(&image, &memory)?;
    for (id, vcpu) in (0..).zip(&vcpus) {
        let entry = (id == 0).then_some(entry);
        vcpu::configure(vcpu, id, config.vcpus, &kvm, entry, &memory)?;
    }

    // A thread for each vCPU, parked.
    let buses = Arc::new(machine.buses);
    let report = machine.ending.report();
    let vcpus = (0..)
        .zip(vcpus)
        .map(|(id, vcpu)| VcpuThread::start(id, vcpu, buses.clone(), report.clone()))
        .collect::<Result<Vec<_>, _>>()?;

    Ok(Vm {
        vcpus,
        devices: machine.devices,
        transports: machine.transports,
        drives,
        _console: machine.console,
        buses,
        generation: machine.generation,
        ending: machine.ending,
        vsock_path,
        taps,
        ready,
        running: false,
        _kvm: kvm,
    })
}

/// Opens what stands behind the virtio devices, in the order in which the guest will number them.
fn open_devices(
    blocks: Vec<Block>,
    nets: Vec<net::Net>,
    vsock: Option<config::Vsock>,
    rng: bool,
) -> Result<Vec<Box<dyn VirtioDevice>>, Error> {
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    let refused = |error: Box<dyn std::error::Error + Send + Sync>| {
        Error::new(ErrorKind::InvalidConfig, "cannot open a device", error)
    };
    for block in blocks {
        devices.push(Box::new(block));
    }
    devices.extend(nets.into_iter().map(|net| Box::new(net) as Box<dyn VirtioDevice>));
    if let Some(config::Vsock { guest_cid, uds_path }) = vsock {
        let config = VsockConfig { guest_cid: guest_cid.into(), uds_path };
        devices.push(Box::new(Vsock::open(&config).map_err(|e| refused(e.into()))?));
    }
    if rng {
        devices.push(Box::new(Rng::new(RngConfig::default())));
    }
    Ok(devices)
}

/// Opens or makes the taps.
fn open_nets(nets: Vec<config::Net>) -> Result<Vec<net::Net>, Error> {
    let refused = |error| Error::new(ErrorKind::InvalidConfig, "cannot open a device", error);
    nets.into_iter().map(net::Net::new).collect::<Result<_, _>>().map_err(refused)
}

fn open_console(console: Console) -> Box<dyn Write + Send> {
    match console {
        Console::Discard => Box::new(io::sink()),
        Console::Stdout => Box::new(io::stdout()),
        Console::File(file) => Box::new(file),
    }
}

/// Anonymous memory, not reserved: a guest costs what it touches.
fn allocate_memory(memory_mib: u64) -> Result<GuestMemory, Error> {
    GuestMemory::from_ranges(&layout::ram(memory_mib)).map_err(|error| {
        let what = format!("memory: cannot map {memory_mib} MiB");
        Error::new(ErrorKind::HostResource, what, io::Error::other(error))
    })
}

/// The caller's words, then each virtio device: kernels with ACPI find the devices there, and those that
/// have only the parameter find them here.
fn command_line(given: &str, places: &[tables::MmioDevice]) -> String {
    let mut line = given.to_owned();
    for place in places {
        let (size, address, gsi) = (layout::VIRTIO_MMIO_SIZE, place.address, place.gsi);
        line.push_str(&format!(" virtio_mmio.device={size}@{address:#x}:{gsi}"));
    }
    line.trim_start().to_owned()
}
