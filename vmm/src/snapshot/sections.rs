//! A machine's registers as sections: kind, version, bytes.
//!
//! A change of a saved type adds a version beside the old one, whose decoder stays. Where two versions have one
//! decoder, the later one only packs its lists (`packed.rs`). A section that is unknown, missing or left over is an
//! error: guessing would start a machine that is subtly another.

use std::io;
use std::sync::Arc;

use rmp_serde::decode::Error;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use super::checksum::{FileSums, Stamp, Sum};
use super::manifest::SectionFacts;
use super::read::check_runs;
use super::state::MachineState;
use super::{STATE_MAX, SnapshotError};
use crate::config::MAX_VCPUS;
use crate::kvm::state::{ClockStateV1, ClockStateV2};
use crate::machine::MAX_VIRTIO;
use crate::memory::{Runs, WorkingSet};
use crate::packed;

const V1: u32 = 1;
const V2: u32 = 2;
const V3: u32 = 3;

/// What `state.bin` holds.
pub struct Saved {
    pub machine: MachineState,
    /// The sums of the large files.
    pub sums: Vec<FileSums>,
    /// The ranges of memory that the snapshot itself holds, if it has a base.
    pub runs: Vec<(u64, u64)>,
    /// What a first use touches, if that was recorded.
    pub working_set: Option<WorkingSetV1>,
    /// What the caller keeps there for itself.
    pub note: Option<Vec<u8>>,
    /// How the large files looked when they were written.
    pub stamps: Vec<Stamp>,
}

/// Ranges of memory that a first use writes, and others that it reads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkingSetV1 {
    #[serde(with = "packed")]
    pub written: Vec<(u64, u64)>,
    #[serde(with = "packed")]
    pub read: Vec<(u64, u64)>,
}

/// Ranges of memory.
#[derive(Serialize, Deserialize)]
struct Ranges(#[serde(with = "packed")] Vec<(u64, u64)>);

impl WorkingSetV1 {
    pub fn of(set: &WorkingSet) -> Self {
        let pairs = |runs: &Runs| runs.iter().map(|run| (run.start, run.end)).collect();
        Self { written: pairs(&set.written), read: pairs(&set.read) }
    }

    /// The same for a memory of `size` bytes, checked.
    pub fn check(&self, size: u64) -> Result<WorkingSet, SnapshotError> {
        let (written, read) = (check_runs(&self.written, size)?, check_runs(&self.read, size)?);
        Ok(WorkingSet { written, read })
    }
}

/// The bytes of `state.bin` and the table of what is where.
pub fn encode(saved: &Saved) -> Result<(Vec<u8>, Vec<SectionFacts>), SnapshotError> {
    let mut writer = Writer::default();
    writer.add_version("clock", V2, &saved.machine.clock)?;
    for vcpu in &saved.machine.vcpus {
        writer.add_version("vcpu", V2, &**vcpu)?;
    }
    writer.add("ioapic", &saved.machine.ioapic)?;
    writer.add("serial", &saved.machine.serial)?;
    for transport in &saved.machine.transports {
        writer.add("virtio", transport)?;
    }
    writer.add_version("runs", V2, &Ranges(saved.runs.clone()))?;
    writer.add_version("checksums", V3, &saved.sums)?;
    if let Some(working_set) = &saved.working_set {
        writer.add_version("working_set", V2, working_set)?;
    }
    if let Some(note) = &saved.note {
        writer.add_bytes("note", V1, note.clone());
    }
    if !saved.stamps.is_empty() {
        writer.add("stamps", &saved.stamps)?;
    }
    Ok((writer.bytes, writer.table))
}

/// Reads all sections, checked against the table.
pub fn decode(bytes: &[u8], table: &[SectionFacts]) -> Result<Saved, SnapshotError> {
    let (mut clock, mut ioapic, mut serial) = (None, None, None);
    let (mut runs, mut sums, mut working_set) = (None, None, None);
    let (mut note, mut stamps) = (None, None);
    let (mut vcpus, mut transports) = (Vec::new(), Vec::new());
    let mut end = 0;
    for section in table {
        let bytes = section_bytes(bytes, section, &mut end)?;
        match (section.kind.as_str(), section.version) {
            ("clock", V1) => {
                let mut first: Option<ClockStateV1> = None;
                once(&mut first, section, bytes)?;
                put_once(&mut clock, section, first.map(ClockStateV2::from))?;
            }
            ("clock", V2) => once(&mut clock, section, bytes)?,
            ("ioapic", V1) => once(&mut ioapic, section, bytes)?,
            ("serial", V1) => once(&mut serial, section, bytes)?,
            ("runs", V1 | V2) => {
                let Ranges(ranges) = value(section, bytes)?;
                put_once(&mut runs, section, Some(ranges))?;
            }
            ("checksums", V1) => {
                once(&mut sums, section, bytes)?;
                let by_crc = |file: &mut FileSums| file.by = Sum::Crc32;
                sums.iter_mut().flatten().for_each(by_crc);
            }
            ("checksums", V2 | V3) => once(&mut sums, section, bytes)?,
            ("working_set", V1 | V2) => once(&mut working_set, section, bytes)?,
            ("stamps", V1) => once(&mut stamps, section, bytes)?,
            ("note", V1) if note.is_none() => note = Some(bytes.to_vec()),
            ("vcpu", V1 | V2) => vcpus.push(Arc::new(value(section, bytes)?)),
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
    let saved = Saved {
        machine: MachineState {
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
    match saved.sums.iter().all(FileSums::is_whole) {
        true => Ok(()),
        false => Err(state("checksums are incomplete")),
    }
}

/// The bytes of one section, which must begin where the one before it ended.
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
    // The decoder does not say how far it is, but whether another value could begin.
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
    fn add(&mut self, kind: &str, value: &impl Serialize) -> Result<(), SnapshotError> {
        self.add_version(kind, V1, value)
    }

    fn add_version(
        &mut self,
        kind: &str,
        version: u32,
        value: &impl Serialize,
    ) -> Result<(), SnapshotError> {
        let bytes = rmp_serde::to_vec(value)
            .map_err(|error| state(&format!("section {kind} does not encode: {error}")))?;
        self.add_bytes(kind, version, bytes);
        Ok(())
    }

    fn add_bytes(&mut self, kind: &str, version: u32, bytes: Vec<u8>) {
        self.table.push(SectionFacts {
            kind: kind.to_owned(),
            version,
            offset: self.bytes.len() as u64,
            len: bytes.len() as u64,
            crc32: crc32fast::hash(&bytes),
        });
        self.bytes.extend(bytes);
    }
}
