//! A snapshot of an invented VM, and hostile changes to it, for tests and fuzzing.

#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use kvm_bindings::kvm_cpuid_entry2;
use pvmm_devices::ioapic::IoapicStateV1;
use pvmm_devices::legacy::SerialStateV1;

use super::checksum::{FileSums, PIECE, Stamp};
use super::manifest::{self, FILES_FORMAT, Manifest, SectionFacts};
use super::sections::{self, Saved, WorkingSetV1};
use super::{DiskFacts, MANIFEST, MEMORY, MachineFacts, MemoryFacts, STATE, files};
use crate::cpu::CpuBaseline;
use crate::kvm::state::{ClockStateV1, VcpuStateV1};
use crate::kvm::vm::KvmHost;
use crate::state::MachineState;

pub(crate) fn vcpu() -> VcpuStateV1 {
    VcpuStateV1 {
        cpuid: vec![kvm_cpuid_entry2 { function: 1, ..Default::default() }],
        msrs: vec![(0x10, 5)],
        regs: Default::default(),
        sregs: Default::default(),
        xcrs: Default::default(),
        xsave: vec![0; 1024],
        debug_regs: Default::default(),
        lapic: Default::default(),
        mp_state: Default::default(),
        events: Default::default(),
        tsc_khz: 1_000_000,
    }
}

pub(super) fn saved() -> Saved {
    let serial = SerialStateV1 {
        baud_divisor_low: 12,
        baud_divisor_high: 0,
        interrupt_enable: 0,
        interrupt_identification: 1,
        line_control: 3,
        line_status: 0x60,
        modem_control: 8,
        modem_status: 0xb0,
        scratch: 0,
        received: Vec::new(),
        pending: Vec::new(),
    };
    let machine = MachineState {
        cpu: CpuBaseline::Host,
        clock: ClockStateV1 { nanoseconds: 7, host_time: 9 },
        vcpus: vec![Arc::new(vcpu())],
        ioapic: IoapicStateV1 { select: 0, id: 0, entries: vec![1 << 16; 24] },
        serial,
        transports: Vec::new(),
    };
    let sums = vec![FileSums { file: MEMORY.into(), size: PIECE, sums: vec![1] }];
    let working_set = WorkingSetV1 { written: vec![(0, 4096)], read: vec![(4096, 8192)] };
    Saved {
        machine,
        sums,
        runs: vec![(0, 4096)],
        working_set: Some(working_set),
        note: None,
        stamps: vec![Stamp { file: MEMORY.into(), ..Stamp::default() }],
    }
}

pub(super) fn manifest(sections: Vec<SectionFacts>) -> Manifest {
    Manifest {
        format: manifest::FORMAT.into(),
        version: manifest::VERSION,
        id: "0123456789abcdef0123456789abcdef".into(),
        created_by: "pvmm".into(),
        created: 1,
        machine: MachineFacts {
            architecture: "x86_64".into(),
            backend: "kvm_amd".into(),
            cpu_vendor: "AuthenticAMD".into(),
            cpu_signature: 0x60fb1,
            cpu_baseline: None,
            vcpus: 1,
            memory_mib: 64,
        },
        memory: MemoryFacts { size: 64 << 20, regions: vec![(0, 64 << 20)], base: None },
        disks: vec![DiskFacts::Inside { file: "disk-0.img".into(), size: 512, read_only: false }],
        taps: vec!["tap0".into()],
        vsock_path: Some("/run/v".into()),
        sections,
        checksum: 0,
    }
}

/// Returns the contents of `state.bin` as a state file has them.
pub(super) fn saved_as_files() -> Saved {
    let sums = vec![1; 64];
    Saved {
        sums: vec![FileSums { file: MEMORY.into(), size: 64 << 20, sums }],
        runs: Vec::new(),
        working_set: None,
        note: Some(b"{\"drives\":[]}".to_vec()),
        ..saved()
    }
}

/// A part of a saved vCPU that depends on the host that saved it.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// The rate of its clock.
    ClockKhz(u32),
    /// Sets an MSR.
    Msr(u32, u64),
    /// Sets bits of a CPUID leaf and sub-leaf, in EAX to EDX.
    Cpuid(u32, u32, [u32; 4]),
    /// Sets the length of the extended state, in 32-bit words.
    ExtendedWords(usize),
    /// Sets bits of XCR0.
    Xcr0(u64),
    /// Sets the instruction pointer.
    Rip(u64),
    /// Sets CR4 to a value that no processor accepts.
    Cr4(u64),
}

/// Changes the last vCPU (the clock rate of all vCPUs) in the snapshot at `path`, a folder or a
/// state file, and corrects every checksum.
pub fn change(path: &Path, changes: &[Change]) {
    let (manifest, mut saved) = read(path);
    for change in changes {
        let vcpu = Arc::make_mut(saved.machine.vcpus.last_mut().unwrap());
        match *change {
            Change::ClockKhz(khz) => {
                let vcpus = &mut saved.machine.vcpus;
                vcpus.iter_mut().for_each(|vcpu| Arc::make_mut(vcpu).tsc_khz = khz);
            }
            Change::Msr(index, value) => {
                vcpu.msrs.retain(|(known, _)| *known != index);
                vcpu.msrs.push((index, value));
            }
            Change::Cpuid(function, index, bits) => {
                let mut leaves = vcpu.cpuid.iter();
                let place =
                    leaves.position(|leaf| (leaf.function, leaf.index) == (function, index));
                let place = place.unwrap_or_else(|| {
                    vcpu.cpuid.push(kvm_cpuid_entry2 { function, index, ..Default::default() });
                    vcpu.cpuid.len() - 1
                });
                let leaf = &mut vcpu.cpuid[place];
                let registers = [&mut leaf.eax, &mut leaf.ebx, &mut leaf.ecx, &mut leaf.edx];
                registers.into_iter().zip(bits).for_each(|(register, bits)| *register |= bits);
            }
            Change::ExtendedWords(words) => vcpu.xsave.resize(words, 0),
            Change::Xcr0(bits) => vcpu.xcrs.xcrs[0].value |= bits,
            Change::Rip(rip) => vcpu.regs.rip = rip,
            Change::Cr4(value) => vcpu.sregs.cr4 = value,
        }
    }
    write(path, manifest, &saved);
}

/// Computes the checksums of a folder again, as an attacker who changed its files would.
pub fn make_sums_right(dir: &Path) {
    let (manifest, mut saved) = read(dir);
    for sums in &mut saved.sums {
        let file = fs::File::open(dir.join(&sums.file)).unwrap();
        *sums = FileSums::of(&sums.file, &file, sums.size).unwrap();
    }
    write(dir, manifest, &saved);
}

fn write(path: &Path, mut manifest: Manifest, saved: &Saved) {
    let (state, table) = sections::encode(saved).unwrap();
    manifest.sections = table;
    let manifest = manifest.encode().unwrap();
    if path.is_dir() {
        fs::write(path.join(STATE), state).unwrap();
        fs::write(path.join(MANIFEST), manifest).unwrap();
    } else {
        fs::write(path, files::join(&manifest, &state).unwrap()).unwrap()
    }
}

/// Returns the clock rate of every vCPU of the snapshot at `path`.
pub fn clock_khz(path: &Path) -> Vec<u32> {
    read(path).1.machine.vcpus.iter().map(|vcpu| vcpu.tsc_khz).collect()
}

/// Returns a CPUID leaf of the last vCPU of the snapshot at `path`.
pub fn cpuid(path: &Path, function: u32, index: u32) -> Option<[u32; 4]> {
    let (_, saved) = read(path);
    let mut leaves = saved.machine.vcpus.last().unwrap().cpuid.iter();
    let leaf = leaves.find(|leaf| leaf.function == function && leaf.index == index)?;
    Some([leaf.eax, leaf.ebx, leaf.ecx, leaf.edx])
}

/// Returns this host's clock rate, and whether its KVM can scale it.
pub fn host_clock() -> (u32, bool) {
    let host = KvmHost::open().unwrap();
    (host.clock_khz().unwrap(), host.scales_clock())
}

fn read(path: &Path) -> (Manifest, Saved) {
    if !path.is_dir() {
        return files::read_state(path).unwrap();
    }
    let manifest = Manifest::decode(&fs::read(path.join(MANIFEST)).unwrap()).unwrap();
    let saved = sections::decode(&fs::read(path.join(STATE)).unwrap(), &manifest.sections).unwrap();
    (manifest, saved)
}

/// Decodes bytes as a state file and as a manifest; then applies them as changes to a valid one of
/// each, with every checksum corrected, and decodes that. What is accepted must encode to equal
/// bytes again.
pub fn walk(bytes: &[u8]) {
    let _ = files::decode(bytes);
    let _ = Manifest::decode(bytes);
    let _ = Manifest::decode_files(bytes);
    let Some((kind, changes)) = bytes.split_first() else { return };
    let as_files = kind & 1 == 0;
    let saved = if as_files { saved_as_files() } else { saved() };
    let (mut state, mut table) = sections::encode(&saved).unwrap();
    let mut manifest = manifest(table.clone());
    if as_files {
        manifest.format = FILES_FORMAT.into();
        manifest.disks = vec![DiskFacts::Named { path: None, read_only: false }];
    }
    let mut changes = changes.chunks_exact(4);
    for change in changes.by_ref() {
        let [act, a, b, value] = change.try_into().unwrap();
        let place = usize::from(u16::from_le_bytes([a, b]));
        match act % 8 {
            0..=3 if !state.is_empty() => {
                let place = place % state.len();
                state[place] = value;
            }
            4 => change_section(&mut table, place, value),
            5 if !table.is_empty() => drop(table.remove(place % table.len())),
            6 => state.truncate(place),
            _ => change_manifest(&mut manifest, a, u64::from(b) << (value % 64)),
        }
    }
    for section in &mut table {
        let range = section.offset as usize..section.offset.saturating_add(section.len) as usize;
        section.crc32 = state.get(range).map_or(0, crc32fast::hash);
    }
    manifest.sections = table;
    let manifest = manifest.encode().unwrap();
    if as_files {
        if let Ok((manifest, saved)) = files::decode(&files::join(&manifest, &state).unwrap()) {
            assert!(saved.note.as_ref().is_some_and(|note| note.len() <= super::NOTE_MAX));
            reads_again(&saved, &manifest);
        }
    } else if let Ok(manifest) = Manifest::decode(&manifest)
        && let Ok(saved) = sections::decode(&state, &manifest.sections)
    {
        reads_again(&saved, &manifest);
    }
}

fn reads_again(saved: &Saved, manifest: &Manifest) {
    let regions: u64 = manifest.regions().iter().map(|region| region.len).sum();
    assert_eq!(regions, manifest.memory.size);
    let (state, table) = sections::encode(saved).unwrap();
    let again = sections::decode(&state, &table).unwrap();
    assert_eq!(sections::encode(&again).unwrap().0, state);
}

fn change_section(table: &mut [SectionFacts], place: usize, value: u8) {
    let count = table.len().max(1);
    let Some(section) = table.get_mut(place % count) else { return };
    match value % 4 {
        0 => section.version = u32::from(value >> 2),
        1 => section.len = section.len.wrapping_add(u64::from(value >> 2)),
        2 => section.offset = section.offset.wrapping_sub(u64::from(value >> 2)),
        _ => {
            let kinds = ["clock", "vcpu", "runs", "note", "stamps", "serial", "virtio", "flux"];
            section.kind = kinds[usize::from(value >> 2) % kinds.len()].to_owned();
        }
    }
}

fn change_manifest(manifest: &mut Manifest, field: u8, value: u64) {
    match field % 8 {
        0 => manifest.machine.vcpus = value as u32,
        1 => manifest.machine.memory_mib = value,
        2 => manifest.memory.size = value,
        3 => manifest.memory.regions.push((value, value)),
        4 => manifest.memory.regions = vec![(0, value)],
        5 => manifest.taps = vec!["tap".to_owned(); (value % 100) as usize],
        6 => manifest.disks.push(DiskFacts::Named { path: None, read_only: true }),
        _ => manifest.version = value as u32,
    }
}
