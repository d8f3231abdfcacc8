//! Restore: from a template to a machine that goes on where the template stands.
//!
//! It never calls `boot.rs`; both walk through the steps of `machine.rs` in the same order.

use pvmm_devices::virtio::balloon::Balloon;
use pvmm_devices::virtio::block::{Block, BlockConfig};
use pvmm_devices::virtio::net::{Net, TapSource};
use pvmm_devices::virtio::registry::DeviceState;
use pvmm_devices::virtio::rng::{Rng, RngConfig};
use pvmm_devices::virtio::vsock::{Vsock, VsockConfig};
use pvmm_devices::vmgenid::VmGenId;

use crate::arch::x86_64::layout;
use crate::boot::open_console;
use crate::config;
use crate::drives::{self, HeldDrive};
use crate::error::{Error, ErrorKind};
use crate::kvm::state;
use crate::kvm::vm::KvmVm;
use crate::machine::{Held, Machine, Opened};
use crate::memory::Memory;
use crate::scratch::Scratch;
use crate::storage::Storage;
use crate::template::{Overrides, Template};
use crate::vm::Vm;

/// Makes a machine of a template, paused.
pub fn restore(template: &Template, mut overrides: Overrides) -> Result<Vm, Error> {
    // What the host must supply.
    let scratch = Scratch::new(overrides.scratch_dir.as_deref());
    let Opened { devices, drives, taps, vsock_path } =
        open_devices(template, &mut overrides, &scratch)?;
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
    let held = Held { drives, taps, scratch, vsock_path, ready: None, base };
    machine.start(vcpus, kvm, memory, held)
}

/// Opens what stands behind the devices. Overrides come first: nothing that was replaced is opened.
fn open_devices(
    template: &Template,
    overrides: &mut Overrides,
    scratch: &Scratch,
) -> Result<Opened, Error> {
    let mut opened = Opened::default();
    for saved in &template.machine.transports {
        match &saved.device {
            DeviceState::Block(saved) => {
                let index = opened.drives.len();
                let refused = refused(format!("drive {index}"));
                let made = match take(&mut overrides.drives, index) {
                    Some(drive) => drives::prepare(drive),
                    None => thaw(template, index, scratch),
                };
                let (config, storage) = made.map_err(&refused)?;
                let block = Block::restore(config, saved).map_err(|e| refused(e.into()))?;
                let held = HeldDrive::new(&block, storage);
                opened.add_drive((block, held));
            }
            DeviceState::Net(saved) => {
                let index = opened.taps.len();
                let tap = template.taps.get(index).cloned().unwrap_or_default();
                let same = || config::Net::new(TapSource::Name(tap));
                let wish = take(&mut overrides.nets, index).unwrap_or_else(same);
                let refused = refused(format!("network card {index}"));
                opened.add_net(Net::restore(wish, saved).map_err(|e| refused(e.into()))?);
            }
            DeviceState::Vsock(saved) => {
                let (guest_cid, uds_path) = match overrides.vsock.take() {
                    Some(config::Vsock { guest_cid, uds_path }) => (guest_cid.into(), uds_path),
                    None => (saved.guest_cid, template.vsock_path.clone().unwrap_or_default()),
                };
                opened.vsock_path = Some(uds_path.clone());
                let vsock = Vsock::open(&VsockConfig { guest_cid, uds_path })
                    .and_then(|vsock| vsock.restore(saved.clone()))
                    .map_err(|e| refused("vsock".to_owned())(e.into()))?;
                opened.devices.push(Box::new(vsock));
            }
            DeviceState::Balloon(saved) => {
                let refused = refused("balloon".to_owned());
                let balloon = Balloon::restore(saved).map_err(|e| refused(e.into()))?;
                opened.devices.push(Box::new(balloon));
            }
            DeviceState::Rng(_) => opened.devices.push(Box::new(Rng::new(RngConfig::default()))),
        }
    }
    check_all_used(overrides, &opened)?;
    Ok(opened)
}

/// An override for a device that is not there is a mistake; devices cannot be added at restore.
fn check_all_used(overrides: &Overrides, opened: &Opened) -> Result<(), Error> {
    let (drives, nets) = (opened.drives.len(), opened.taps.len());
    let unused = match (overrides.drives.first(), overrides.nets.first(), &overrides.vsock) {
        (Some((index, _)), ..) => format!("drive {index}: the template has {drives}"),
        (_, Some((index, _)), _) => format!("network card {index}: the template has {nets}"),
        (.., Some(_)) => "vsock: the template has none".to_owned(),
        _ => return Ok(()),
    };
    Err(Error::plain(ErrorKind::InvalidConfig, unused))
}

fn thaw(
    template: &Template,
    index: usize,
    scratch: &Scratch,
) -> Result<(BlockConfig, Storage), drives::OpenError> {
    let frozen = template.drives.get(index).ok_or("the snapshot has no such disk")?;
    Ok(frozen.thaw(scratch)?)
}

fn take<T>(overrides: &mut Vec<(usize, T)>, index: usize) -> Option<T> {
    let position = overrides.iter().position(|(place, _)| *place == index)?;
    Some(overrides.swap_remove(position).1)
}

fn refused(what: String) -> impl Fn(drives::OpenError) -> Error {
    move |error| Error::new(ErrorKind::InvalidConfig, what.clone(), error)
}
