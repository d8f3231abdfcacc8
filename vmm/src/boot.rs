//! Boot: from a configuration to a machine that is about to run its kernel's first instruction.

use pvmm_devices::virtio::registry::DeviceConfig;

use crate::agent::ReadyListener;
use crate::arch::x86_64::{cpuid, kernel, layout, mp_table, tables};
use crate::config::{Registers, VmConfig};
use crate::error::{Error, ErrorKind};
use crate::kvm::vcpu;
use crate::kvm::vm::{Kvm, KvmVm};
use crate::machine::{
    Machine, MachineBuilder, MachineError, Opened, VmResources, drives, open_console,
};
use crate::memory::{Memory, MemoryImage, Mode};
use crate::scratch::Scratch;
use crate::trace;

/// Makes the machine that `config` describes, paused before its first instruction.
///
/// Everything the machine will ever open is opened before its threads start.
pub fn boot(kvm: &Kvm, mut config: VmConfig) -> Result<Machine, Error> {
    config.validate()?;
    let offered = kvm.0.offered(&config.cpu)?;

    // What the host must supply.
    let socket = config.vsock.as_ref().map(|vsock| vsock.uds_path.as_path());
    let socket = socket.filter(|_| config.awaits_agent);
    let ready = socket.map(ReadyListener::bind).transpose()?;
    let scratch = Scratch::new(config.host.scratch_dir.as_deref(), config.host.scratch_in_memory);
    let Opened { devices, drives, taps, vsock_path } = open_devices(&mut config)?;
    trace::step("open devices");
    let track_changes = config.host.track_changes;
    let image = MemoryImage::empty(layout::regions(config.memory_mib));
    let mut memory = Memory::map(image, Mode::Private, None)?;
    memory.set_pagemap(config.host.pagemap.clone());
    let guest = &memory.guest;
    if config.host.huge_pages {
        memory.advise_huge_pages();
    }

    // KVM: memory and vCPUs first, then whatever registers on its I/O bus.
    let host = &kvm.0;
    let kvm = KvmVm::new(host, guest)?;
    let vcpus = (0..config.vcpus).map(|id| kvm.create_vcpu(id)).collect::<Result<Vec<_>, _>>()?;
    trace::step("KVM machine, slots and vCPUs");
    let mut builder = MachineBuilder::new(
        &kvm,
        guest,
        open_console(config.host.console, config.host.console_limit),
    )?;
    builder.generation.write()?;
    for device in devices {
        builder.attach(device, &kvm, guest)?;
    }
    for Registers { address, device } in config.registers {
        let place = builder.buses.mmio.insert(address, Registers::SIZE, device);
        place.map_err(MachineError::from)?;
    }
    trace::step("machine and devices");

    // What the guest finds: tables, kernel, registers.
    let places = builder.places();
    let image = kernel::Image {
        kernel: &config.kernel,
        initrd: config.initrd.as_ref(),
        cmdline: &command_line(&config.cmdline, &places),
        protocol: config.boot_protocol,
        memory_mib: config.memory_mib,
        rsdp: tables::write(config.vcpus, &places, config.keyboard, guest)?,
    };
    mp_table::write(config.vcpus, guest)?;
    let entry = kernel::load(&image, guest)?;
    trace::step("load kernel");
    let threads_per_core = if config.smt { 2 } else { 1 };
    let topology = cpuid::Topology { vcpus: config.vcpus, threads_per_core };
    let processor =
        vcpu::Processor { offered: &offered, topology, msrs: config.cpu.msr_modifiers() };
    for (id, vcpu) in (0..).zip(&vcpus) {
        let entry = (id == 0).then_some(entry);
        vcpu::configure(vcpu, id, &processor, entry, guest)?;
    }

    let resources = VmResources {
        drives,
        taps,
        scratch,
        vsock_path,
        ready,
        base: None,
        working_set: None,
        track_changes,
        memory_sums: None,
        clock_khz: None,
        cpu: config.cpu,
        vcpu_thread_prefix: config.host.vcpu_thread_prefix,
        thread_filters: config.host.thread_filters,
    };
    builder.finish(vcpus, kvm, memory, resources)
}

/// Opens what stands behind the virtio devices, in the order in which the guest will number them.
fn open_devices(config: &mut VmConfig) -> Result<Opened, Error> {
    let mut opened = Opened::default();
    let refused = |error: Box<dyn std::error::Error + Send + Sync>| {
        Error::new(ErrorKind::InvalidConfig, "cannot open a device", error)
    };
    for drive in std::mem::take(&mut config.drives) {
        let (config, storage) = drives::prepare(drive).map_err(refused)?;
        let device = DeviceConfig::Block(config).open().map_err(|e| refused(e.into()))?;
        opened.add(device, Some(storage));
    }
    for config in config.take_devices() {
        opened.add(config.open().map_err(|e| refused(e.into()))?, None);
    }
    Ok(opened)
}

/// The caller's words, then each virtio device: kernels with ACPI find the devices there, and those
/// that have only the parameter find them here.
fn command_line(given: &str, places: &[tables::MmioDevice]) -> String {
    let mut line = given.to_owned();
    for place in places {
        let (size, address, gsi) = (layout::VIRTIO_MMIO_SIZE, place.address, place.gsi);
        line.push_str(&format!(" virtio_mmio.device={size}@{address:#x}:{gsi}"));
    }
    line.trim_start().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_names_each_device_after_the_words_of_the_caller() {
        let device = |address, gsi| tables::MmioDevice { address, gsi };
        let places = [device(0xd000_0000, 6), device(0xd000_1000, 7)];
        let expected =
            "quiet virtio_mmio.device=4096@0xd0000000:6 virtio_mmio.device=4096@0xd0001000:7";
        assert_eq!(command_line("quiet", &places), expected);
        assert_eq!(command_line("", &places[..0]), "");
    }
}
