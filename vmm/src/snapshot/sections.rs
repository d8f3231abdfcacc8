//! Encodes the state of a VM as sections, each with a kind, a version and bytes.
//!
//! From the first release on, a change of a saved type adds a new version, and the decoder of the
//! old one stays. A section that is unknown, missing or repeated is an error: guessing would start
//! a VM that differs subtly.

use std::io;
use std::sync::Arc;

use rmp_serde::decode::Error;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use super::checksum::{FileSums, Stamp};
use super::manifest::SectionFacts;
use super::read::check_runs;
use super::{STATE_MAX, SnapshotError};
use crate::config::MAX_VCPUS;
use crate::cpu::CpuBaseline;
use crate::kvm::state::VcpuStateV1;
use crate::machine::MAX_VIRTIO;
use crate::memory::{PageRanges, WorkingSet};
use crate::packed;
use crate::state::MachineState;

const V1: u32 = 1;

/// The contents of `state.bin`.
pub struct Saved {
    pub machine: MachineState,
    /// The checksums of the large files.
    pub sums: Vec<FileSums>,
    /// The page ranges that the snapshot itself holds, if it has a base.
    pub runs: Vec<(u64, u64)>,
    /// The recorded working set, if there is one.
    pub working_set: Option<WorkingSetV1>,
    /// Data of the caller.
    pub note: Option<Vec<u8>>,
    /// The stamps of the large files when they were written.
    pub stamps: Vec<Stamp>,
}

/// The contents of `state.bin` in a snapshot of disks alone.
pub struct SavedDisks {
    /// The processor features that the VM was offered.
    pub cpu: CpuBaseline,
    /// The checksums of the disks.
    pub sums: Vec<FileSums>,
    /// Data of the caller.
    pub note: Option<Vec<u8>>,
    /// The stamps of the disks when they were written.
    pub stamps: Vec<Stamp>,
}

/// The page ranges that a first use writes, and those that it only reads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkingSetV1 {
    #[serde(with = "packed")]
    pub written: Vec<(u64, u64)>,
    #[serde(with = "packed")]
    pub read: Vec<(u64, u64)>,
}

/// Page ranges, packed.
#[derive(Serialize, Deserialize)]
struct Ranges(#[serde(with = "packed")] Vec<(u64, u64)>);

impl WorkingSetV1 {
    pub fn of(set: &WorkingSet) -> Self {
        let pairs = |runs: &PageRanges| runs.iter().map(|run| (run.start, run.end)).collect();
        Self { written: pairs(&set.written), read: pairs(&set.read) }
    }

    /// Checks the ranges against a memory of `size` bytes and converts them.
    pub fn check(&self, size: u64) -> Result<WorkingSet, SnapshotError> {
        let (written, read) = (check_runs(&self.written, size)?, check_runs(&self.read, size)?);
        Ok(WorkingSet { written, read })
    }
}

/// Returns the bytes of `state.bin` and the table of its sections.
pub fn encode(saved: &Saved) -> Result<(Vec<u8>, Vec<SectionFacts>), SnapshotError> {
    let mut writer = Writer::default();
    writer.add_baseline(&saved.machine.cpu)?;
    writer.add("clock", &saved.machine.clock)?;
    for vcpu in &saved.machine.vcpus {
        writer.add("vcpu", &**vcpu)?;
    }
    writer.add("ioapic", &saved.machine.ioapic)?;
    writer.add("serial", &saved.machine.serial)?;
    for transport in &saved.machine.transports {
        writer.add("virtio", transport)?;
    }
    writer.add("runs", &Ranges(saved.runs.clone()))?;
    writer.add("checksums", &saved.sums)?;
    if let Some(working_set) = &saved.working_set {
        writer.add("working_set", working_set)?;
    }
    if let Some(note) = &saved.note {
        writer.add_bytes("note", note.clone());
    }
    if !saved.stamps.is_empty() {
        writer.add("stamps", &saved.stamps)?;
    }
    Ok((writer.bytes, writer.table))
}

/// Returns the bytes of `state.bin` of a snapshot of disks alone, and the table of its sections.
pub fn encode_disks(saved: &SavedDisks) -> Result<(Vec<u8>, Vec<SectionFacts>), SnapshotError> {
    let mut writer = Writer::default();
    writer.add_baseline(&saved.cpu)?;
    writer.add("checksums", &saved.sums)?;
    if let Some(note) = &saved.note {
        writer.add_bytes("note", note.clone());
    }
    if !saved.stamps.is_empty() {
        writer.add("stamps", &saved.stamps)?;
    }
    Ok((writer.bytes, writer.table))
}

/// Decodes what [`encode_disks`] has encoded.
pub fn decode_disks(bytes: &[u8], table: &[SectionFacts]) -> Result<SavedDisks, SnapshotError> {
    let (mut sums, mut note, mut stamps, mut cpu, mut end) = (None, None, None, None, 0);
    for section in table {
        let bytes = section_bytes(bytes, section, &mut end)?;
        match (section.kind.as_str(), section.version) {
            ("cpu", V1) => once(&mut cpu, section, bytes)?,
            ("checksums", V1) => once(&mut sums, section, bytes)?,
            ("stamps", V1) => once(&mut stamps, section, bytes)?,
            ("note", V1) if note.is_none() => note = Some(bytes.to_vec()),
            (kind, version) => {
                let kind = kind.chars().take(40).collect();
                return Err(SnapshotError::SectionVersion { kind, version });
            }
        }
    }
    if end != bytes.len() as u64 {
        return Err(state("has bytes that belong to no section"));
    }
    let sums: Vec<FileSums> = sums.ok_or_else(|| state("a section is missing"))?;
    if !sums.iter().all(FileSums::is_whole) {
        return Err(state("checksums are incomplete"));
    }
    Ok(SavedDisks { cpu: checked(cpu)?, sums, note, stamps: stamps.unwrap_or_default() })
}

/// Decodes all sections and checks them against the table.
pub fn decode(bytes: &[u8], table: &[SectionFacts]) -> Result<Saved, SnapshotError> {
    let (mut clock, mut ioapic, mut serial) = (None, None, None);
    let (mut runs, mut sums, mut working_set) = (None, None, None);
    let (mut note, mut stamps, mut cpu) = (None, None, None);
    let (mut vcpus, mut transports) = (Vec::new(), Vec::new());
    let mut end = 0;
    for section in table {
        let bytes = section_bytes(bytes, section, &mut end)?;
        match (section.kind.as_str(), section.version) {
            ("cpu", V1) => once(&mut cpu, section, bytes)?,
            ("clock", V1) => once(&mut clock, section, bytes)?,
            ("ioapic", V1) => once(&mut ioapic, section, bytes)?,
            ("serial", V1) => once(&mut serial, section, bytes)?,
            ("runs", V1) => {
                let Ranges(ranges) = value(section, bytes)?;
                put_once(&mut runs, section, Some(ranges))?;
            }
            ("checksums", V1) => once(&mut sums, section, bytes)?,
            ("working_set", V1) => once(&mut working_set, section, bytes)?,
            ("stamps", V1) => once(&mut stamps, section, bytes)?,
            ("note", V1) if note.is_none() => note = Some(bytes.to_vec()),
            ("vcpu", V1) => vcpus.push(value(section, bytes)?),
            ("virtio", V1) => transports.push(value(section, bytes)?),
            (kind, version) => {
                let kind = kind.chars().take(40).collect();
                return Err(SnapshotError::SectionVersion { kind, version });
            }
        }
    }
    if end != bytes.len() as u64 {
        return Err(state("has bytes that belong to no section"));
    }
    let missing = || state("a section is missing");
    let cpu = checked(cpu)?;
    let limited = |mut vcpu: VcpuStateV1| {
        vcpu.limit_to(&cpu);
        Arc::new(vcpu)
    };
    let vcpus = vcpus.into_iter().map(limited).collect();
    let saved = Saved {
        machine: MachineState {
            cpu,
            clock: clock.ok_or_else(missing)?,
            vcpus,
            ioapic: ioapic.ok_or_else(missing)?,
            serial: serial.ok_or_else(missing)?,
            transports,
        },
        sums: sums.ok_or_else(missing)?,
        runs: runs.ok_or_else(missing)?,
        working_set,
        note,
        stamps: stamps.unwrap_or_default(),
    };
    check(&saved)?;
    Ok(saved)
}

/// Returns the baseline of a section, or that of a snapshot without such a section.
fn checked(cpu: Option<CpuBaseline>) -> Result<CpuBaseline, SnapshotError> {
    let cpu = cpu.unwrap_or_default();
    cpu.check().map_err(|what| state(&format!("the baseline has too many {what}")))?;
    Ok(cpu)
}

fn check(saved: &Saved) -> Result<(), SnapshotError> {
    let machine = &saved.machine;
    if machine.vcpus.is_empty() || machine.vcpus.len() > MAX_VCPUS as usize {
        return Err(state("number of vCPUs is impossible"));
    }
    if machine.transports.len() > MAX_VIRTIO {
        return Err(state("there are too many devices"));
    }
    for vcpu in &machine.vcpus {
        vcpu.check().map_err(|what| state(&format!("a vCPU has impossible {what}")))?;
    }
    if machine.vcpus.windows(2).any(|pair| pair[0].tsc_khz != pair[1].tsc_khz) {
        return Err(state("vCPUs have clocks of different rates"));
    }
    if saved.sums.iter().all(FileSums::is_whole) {
        Ok(())
    } else {
        Err(state("checksums are incomplete"))
    }
}

/// Returns the bytes of one section, which must begin where the previous one ended.
fn section_bytes<'a>(
    bytes: &'a [u8],
    section: &SectionFacts,
    end: &mut u64,
) -> Result<&'a [u8], SnapshotError> {
    if section.offset != *end || section.len > STATE_MAX {
        return Err(state("sections do not follow each other"));
    }
    *end += section.len;
    let range = section.offset as usize..*end as usize;
    let bytes = bytes.get(range).ok_or_else(|| state("is shorter than its sections"))?;
    if crc32fast::hash(bytes) != section.crc32 {
        return Err(SnapshotError::Checksum {
            file: super::STATE.to_owned(),
            offset: section.offset,
        });
    }
    Ok(bytes)
}

fn once<T: DeserializeOwned>(
    place: &mut Option<T>,
    section: &SectionFacts,
    bytes: &[u8],
) -> Result<(), SnapshotError> {
    put_once(place, section, Some(value(section, bytes)?))
}

fn put_once<T>(
    place: &mut Option<T>,
    section: &SectionFacts,
    value: Option<T>,
) -> Result<(), SnapshotError> {
    match std::mem::replace(place, value) {
        None => Ok(()),
        Some(_) => Err(state(&format!("has two sections {}", section.kind))),
    }
}

fn value<T: DeserializeOwned>(section: &SectionFacts, bytes: &[u8]) -> Result<T, SnapshotError> {
    let mut decoder = rmp_serde::Deserializer::from_read_ref(bytes);
    let value = T::deserialize(&mut decoder).map_err(|error| {
        let why: String = error.to_string().chars().take(120).collect();
        state(&format!("section {} does not decode: {why}", section.kind))
    })?;
    // The decoder does not report its position, but whether another value could begin.
    match IgnoredAny::deserialize(&mut decoder) {
        Err(Error::InvalidMarkerRead(end)) if end.kind() == io::ErrorKind::UnexpectedEof => {
            Ok(value)
        }
        _ => Err(state(&format!("section {} has bytes left over", section.kind))),
    }
}

fn state(what: &str) -> SnapshotError {
    SnapshotError::State(what.to_owned())
}

#[derive(Default)]
struct Writer {
    bytes: Vec<u8>,
    table: Vec<SectionFacts>,
}

impl Writer {
    /// Adds the processor baseline. A snapshot without one has no such section, so that earlier
    /// versions read it.
    fn add_baseline(&mut self, cpu: &CpuBaseline) -> Result<(), SnapshotError> {
        if cpu.is_host() { Ok(()) } else { self.add("cpu", cpu) }
    }

    fn add(&mut self, kind: &str, value: &impl Serialize) -> Result<(), SnapshotError> {
        let bytes = rmp_serde::to_vec(value)
            .map_err(|error| state(&format!("section {kind} does not encode: {error}")))?;
        self.add_bytes(kind, bytes);
        Ok(())
    }

    fn add_bytes(&mut self, kind: &str, bytes: Vec<u8>) {
        self.table.push(SectionFacts {
            kind: kind.to_owned(),
            version: V1,
            offset: self.bytes.len() as u64,
            len: bytes.len() as u64,
            crc32: crc32fast::hash(&bytes),
        });
        self.bytes.extend(bytes);
    }
}
