//! Restore: from a template to a machine that goes on where the template stands.
//!
//! It never calls `boot.rs`; both walk through the steps of `machine.rs` in the same order.

use pvmm_devices::virtio::VirtioDevice;
use pvmm_devices::virtio::block::Block;
use pvmm_devices::virtio::registry::DeviceState;
use pvmm_devices::virtio::rng::{Rng, RngConfig};
use pvmm_devices::virtio::vsock::{Vsock, VsockConfig};
use pvmm_devices::vmgenid::VmGenId;

use crate::arch::x86_64::layout;
use crate::boot::open_console;
use crate::config;
use crate::drives;
use crate::error::{Error, ErrorKind};
use crate::kvm::state;
use crate::kvm::vm::KvmVm;
use crate::machine::{Held, Machine, Opened};
use crate::memory::Memory;
use crate::scratch::Scratch;
use crate::template::{Overrides, Template};
use crate::vm::Vm;

/// Makes a machine of a template, paused.
pub fn restore(template: &Template, overrides: Overrides) -> Result<Vm, Error> {
    // What the host must supply.
    let scratch = Scratch::new(overrides.scratch_dir.as_deref());
    let vsock = overrides.vsock;
    let Opened { devices, drives, vsock_path } =
        open_devices(template, vsock, overrides.drives, &scratch)?;
    let memory = Memory::map(template.image.clone())?;

    // KVM: memory and vCPUs first, then whatever registers on its I/O bus.
    let saved = &*template.machine;
    let kvm = KvmVm::new(&template.host, &memory.guest)?;
    let mut vcpus = Vec::with_capacity(saved.vcpus.len());
    for (id, saved) in (0..).zip(&saved.vcpus) {
        let vcpu = kvm.create_vcpu(id)?;
        state::load_features(&vcpu, id, saved)?;
        vcpus.push(vcpu);
    }
    let generation = VmGenId::existing(&memory.guest, layout::GENERATION)?;
    let mut machine = Machine::new(&kvm, generation, open_console(overrides.console))?;
    machine.devices.handle().quiesce_all()?;
    for device in devices {
        machine.attach(device, &kvm, &memory.guest)?;
    }

    // State: interrupt routes and local APICs before the devices, which raise what was pending.
    state::load_clock(kvm.fd(), saved.clock)?;
    machine.ioapic.restore(&saved.ioapic);
    for ((id, vcpu), saved) in (0..).zip(&vcpus).zip(&saved.vcpus) {
        state::load(vcpu, id, saved, kvm.shape())?;
    }
    for (transport, saved) in machine.transports.iter().zip(&saved.transports) {
        transport.restore(saved)?;
    }
    machine.serial.restore(&saved.serial)?;
    machine.generation.renew()?;

    let base = template.base.clone();
    machine.start(vcpus, kvm, memory, Held { drives, scratch, vsock_path, ready: None, base })
}

/// Opens what stands behind the devices. Overrides come first: nothing that was replaced is opened.
fn open_devices(
    template: &Template,
    mut vsock: Option<config::Vsock>,
    mut overrides: Vec<(usize, config::Drive)>,
    scratch: &Scratch,
) -> Result<Opened, Error> {
    let mut opened = Opened::default();
    let refused = |what: String| {
        move |error: Box<dyn std::error::Error + Send + Sync>| {
            Error::new(ErrorKind::InvalidConfig, what, error)
        }
    };
    for saved in &template.machine.transports {
        let device: Box<dyn VirtioDevice> = match &saved.device {
            DeviceState::Block(saved) => {
                let index = opened.drives.len();
                let what = format!("drive {index}");
                let replaced = overrides.iter().position(|(place, _)| *place == index);
                let (config, drive) = match replaced {
                    Some(position) => drives::open(overrides.swap_remove(position).1, index)?,
                    None => {
                        let frozen = template.drives.get(index).ok_or_else(|| {
                            Error::plain(ErrorKind::SnapshotCorrupt, format!("{what} is missing"))
                        })?;
                        frozen.thaw(scratch).map_err(|e| refused(what.clone())(e.into()))?
                    }
                };
                opened.drives.push(drive);
                Box::new(Block::restore(config, saved).map_err(|e| refused(what)(e.into()))?)
            }
            DeviceState::Vsock(saved) => {
                let (guest_cid, uds_path) = match vsock.take() {
                    Some(config::Vsock { guest_cid, uds_path }) => (guest_cid.into(), uds_path),
                    None => (saved.guest_cid, template.vsock_path.clone().unwrap_or_default()),
                };
                opened.vsock_path = Some(uds_path.clone());
                let vsock = Vsock::open(&VsockConfig { guest_cid, uds_path })
                    .and_then(|vsock| vsock.restore(saved.clone()));
                Box::new(vsock.map_err(|e| refused("vsock".to_owned())(e.into()))?)
            }
            DeviceState::Rng(_) => Box::new(Rng::new(RngConfig::default())),
        };
        opened.devices.push(device);
    }
    if let Some((index, _)) = overrides.first() {
        let what = format!("drive {index}: the template has {}", opened.drives.len());
        return Err(Error::plain(ErrorKind::InvalidConfig, what));
    }
    if vsock.is_some() {
        let what = "vsock: the template has none, and a device cannot be added at restore";
        return Err(Error::plain(ErrorKind::InvalidConfig, what));
    }
    Ok(opened)
}
