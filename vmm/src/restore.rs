//! Restore: from a template to a machine that goes on where the template stands.
//!
//! It never calls `boot.rs`; both walk through the steps of `machine/builder.rs` in one order.

use std::sync::Arc;

use pvmm_devices::virtio::block::BlockConfig;
use pvmm_devices::virtio::block::wire::SECTOR_SIZE;
use pvmm_devices::virtio::net::{NetConfig, SOCKET_NAME, TapSource};
use pvmm_devices::virtio::registry::{DeviceConfig, DeviceKind, DeviceState};
use pvmm_devices::virtio::vsock::{VsockConfig, VsockStateV1};

use crate::ablation::Mechanism;
use crate::config::{HostOptions, Overrides, Prefault};
use crate::error::{Error, ErrorKind};
use crate::frozen::Frozen;
use crate::kvm::vm::{KvmError, KvmHost, KvmVm};
use crate::kvm::{state, vcpu};
use crate::machine::{Machine, MachineBuilder, Opened, VmResources, drives, open_console};
use crate::memory::{Memory, Mode, PageServer, WorkingSet};
use crate::scratch::Scratch;
use crate::storage::Storage;
use crate::trace;
use crate::vcpu::thread::Preparation;

/// Makes a machine of a template, paused.
pub fn restore(template: &Frozen, mut overrides: Overrides) -> Result<Machine, Error> {
    // What the host must supply.
    let scratch =
        Scratch::new(overrides.host.scratch_dir.as_deref(), overrides.host.scratch_in_memory);
    let Opened { devices, drives, taps, vsock_path } =
        open_devices(template, &mut overrides, &scratch)?;
    trace::step("open devices");
    let memory = map_memory(template, &overrides)?;
    let working_set = template.working_set.clone();
    trace::step("map memory");
    let mut page_server = connect_page_server(template, &overrides, &memory)?;

    // KVM: memory and vCPUs first, then whatever registers on its I/O bus.
    let saved = &*template.state;
    let kvm = KvmVm::new(&template.host, &memory.guest)?;
    trace::step("KVM machine and slots");
    let mut vcpus = Vec::with_capacity(saved.vcpus.len());
    for (id, saved) in (0..).zip(&saved.vcpus) {
        let vcpu = kvm.create_vcpu(id)?;
        state::load_features(&vcpu, id, saved, template.host.scales_clock()).map_err(not_taken)?;
        vcpus.push(vcpu);
    }
    trace::step("vCPUs and CPUID");
    let mut builder = MachineBuilder::new(
        &kvm,
        &memory.guest,
        open_console(overrides.host.console, overrides.host.console_limit),
    )?;
    builder.devices.handle().quiesce_all()?;
    trace::step("machine");
    for device in devices {
        builder.attach(device, &kvm, &memory.guest)?;
    }
    trace::step("attach devices");

    // State: both kinds of APIC before the devices, which raise what was pending.
    let clock =
        if overrides.catch_up { saved.clock.advanced(state::host_time()) } else { saved.clock };
    state::load_clock(kvm.fd(), clock)?;
    builder.ioapic.restore(&saved.ioapic);
    trace::step("clock and I/O APIC");
    for ((id, vcpu), saved) in (0..).zip(&vcpus).zip(&saved.vcpus) {
        let msrs = state::msrs_to_set(vcpu, id, saved, &kvm)?;
        state::load(vcpu, id, saved, kvm.shape(), Some(&msrs)).map_err(not_taken)?;
    }
    trace::step("vCPU state");
    for (transport, saved) in builder.transports.iter().zip(&saved.transports) {
        transport.restore(saved)?;
    }
    trace::step("device state");
    builder.serial.restore(&saved.serial)?;
    builder.generation.renew()?;
    trace::step("serial and generation");

    let prefault = match (&working_set, &page_server) {
        (Some(set), None) => prefault(set, overrides.prefault, &memory, &template.host),
        _ => None,
    };
    if let Some(server) = &mut page_server {
        server.started(builder.devices.handle().clone(), builder.ending.report())?;
    }
    let (base, ready) = (template.base.clone(), None);
    let memory_sums = template.memory_sums.clone();
    let clock_khz = saved.vcpus.first().map(|vcpu| vcpu.tsc_khz);
    let HostOptions { track_changes, vcpu_thread_prefix, thread_filters, .. } = overrides.host;
    #[rustfmt::skip]
    let resources = VmResources {
        drives, taps, scratch, vsock_path, ready, base, working_set, track_changes, memory_sums, clock_khz,
        cpu: saved.cpu.clone(),
        vcpu_thread_prefix, thread_filters,
    };
    let mut machine = builder.finish(vcpus, kvm, memory, resources)?;
    machine.page_server = page_server;
    machine.prefault = prefault;
    trace::step("hand over");
    Ok(machine)
}

/// Maps the template's memory for a guest.
fn map_memory(template: &Frozen, overrides: &Overrides) -> Result<Memory, Error> {
    let mode = match overrides {
        Overrides { page_server: Some(_), .. } => Mode::Remote,
        _ if overrides.host.track_changes => Mode::Tracked,
        _ => Mode::Private,
    };
    let mut memory = Memory::map(template.image.clone(), mode, template.working_set.as_deref())?;
    memory.set_pagemap(overrides.host.pagemap.clone());
    if overrides.host.huge_pages {
        memory.advise_huge_pages();
    }
    Ok(memory)
}

/// Hands the memory's faults to the server that the overrides name.
fn connect_page_server(
    template: &Frozen,
    overrides: &Overrides,
    memory: &Memory,
) -> Result<Option<PageServer>, Error> {
    match &overrides.page_server {
        None if template.without_memory => {
            let what = "page server: the template was loaded without its memory, and none is named";
            Err(Error::plain(ErrorKind::InvalidConfig, what))
        }
        Some(_) if !template.without_memory => {
            let what = "page server: the template has its memory; load it without";
            Err(Error::plain(ErrorKind::InvalidConfig, what))
        }
        Some(path) => {
            let filters = overrides.host.thread_filters.clone();
            Ok(Some(PageServer::connect(path, &memory.guest, filters)?))
        }
        None => Ok(None),
    }
}

/// Returns a closure that prefaults the working set, for the first vCPU's thread: KVM asks a vCPU
/// how memory is walked, and meanwhile the owner dials.
fn prefault(
    set: &Arc<WorkingSet>,
    wish: Prefault,
    memory: &Memory,
    host: &Arc<KvmHost>,
) -> Option<Preparation> {
    if wish == Prefault::Nothing || !Mechanism::Prefault.in_use() {
        return None;
    }
    let (set, guest, host) = (set.clone(), memory.guest.clone(), host.clone());
    Some(Box::new(move |vcpu| {
        set.prefault(&guest);
        if wish == Prefault::InKvm && host.pre_faults() {
            vcpu::pre_fault(vcpu, &set.guest_ranges(&guest));
        }
    }))
}

/// Opens what stands behind the devices. Overrides come first: nothing that was replaced is opened.
fn open_devices(
    template: &Frozen,
    overrides: &mut Overrides,
    scratch: &Scratch,
) -> Result<Opened, Error> {
    let mut opened = Opened::default();
    for saved in &template.state.transports {
        let (state, kind) = (&saved.device, saved.device.kind());
        let index = opened.count(kind);
        let refused = refused(match kind {
            DeviceKind::Block => format!("drive {index}"),
            DeviceKind::Net => format!("network card {index}"),
            kind => kind.name().to_owned(),
        });
        let supplied = supply(template, overrides, scratch, state, index);
        let (config, storage) = supplied.map_err(&refused)?;
        opened.add(state.restore(config).map_err(|e| refused(e.into()))?, storage);
    }
    check_all_used(overrides, &opened)?;
    Ok(opened)
}

/// Returns what the host supplies for a saved device, the `index`th of its kind: the override if
/// there is one, otherwise what the template names.
fn supply(
    template: &Frozen,
    overrides: &mut Overrides,
    scratch: &Scratch,
    state: &DeviceState,
    index: usize,
) -> Result<(Option<DeviceConfig>, Option<Storage>), drives::OpenError> {
    let config = match state {
        DeviceState::Block(saved) => {
            let size = saved.capacity_sectors.saturating_mul(SECTOR_SIZE);
            let (config, storage) = match take(&mut overrides.drives, index) {
                Some(drive) => drives::prepare_restored(drive, size)?,
                None => thaw(template, index, scratch, size)?,
            };
            return Ok((Some(DeviceConfig::Block(config)), Some(storage)));
        }
        DeviceState::Net(_) => {
            let tap = template.taps.get(index).cloned().unwrap_or_default();
            let config = match take(&mut overrides.nets, index) {
                Some(config) => config,
                // A socket has a peer, which only the caller can supply again.
                None if tap == SOCKET_NAME => {
                    return Err("the card was on a socket; supply another one for it".into());
                }
                None => NetConfig::new(TapSource::Name(tap)),
            };
            Some(DeviceConfig::Net(config))
        }
        DeviceState::Vsock(VsockStateV1 { guest_cid, .. }) => {
            let same = || {
                let uds_path = template.vsock_path.clone().unwrap_or_default();
                VsockConfig { guest_cid: *guest_cid, uds_path, keep_socket: false, dial_path: None }
            };
            let config = overrides.vsock.take().map_or_else(same, VsockConfig::from);
            Some(DeviceConfig::Vsock(config))
        }
        _ => overrides.device(state.kind()),
    };
    Ok((config, None))
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
    template: &Frozen,
    index: usize,
    scratch: &Scratch,
    size: u64,
) -> Result<(BlockConfig, Storage), drives::OpenError> {
    let frozen = template.drives.get(index).ok_or("the snapshot has no such disk")?;
    Ok(frozen.thaw(scratch, size)?)
}

fn take<T>(overrides: &mut Vec<(usize, T)>, index: usize) -> Option<T> {
    let position = overrides.iter().position(|(place, _)| *place == index)?;
    Some(overrides.swap_remove(position).1)
}

/// A state that KVM does not take back is one of another host, whatever `snapshot/host.rs` found
/// right about it.
fn not_taken(error: KvmError) -> Error {
    Error::new(ErrorKind::SnapshotIncompatible, "KVM", error)
}

fn refused(what: String) -> impl Fn(drives::OpenError) -> Error {
    move |error| Error::new(ErrorKind::InvalidConfig, what.clone(), error)
}
