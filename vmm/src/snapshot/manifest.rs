//! The manifest of a snapshot, as JSON that people and other programs can read.
//!
//! The text is canonical: it is accepted only if it is byte for byte what would be written, so that
//! one meaning has one text, and a checksum covers it.

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::SnapshotError;
use crate::config::{MAX_DRIVES, MAX_MEMORY_MIB, MAX_VCPUS};
use crate::machine::MAX_VIRTIO;
use crate::memory::{PAGE, Region};

pub const FORMAT: &str = "pvmm-snapshot";
/// The format of a state file, so that it is never mistaken for a folder's manifest.
pub const FILES_FORMAT: &str = "pvmm-files";
/// The format of a folder without memory and registers.
pub const DISKS_FORMAT: &str = "pvmm-disks";
pub const VERSION: u32 = 1;
const ID_LEN: usize = 32;
const MAX_REGIONS: usize = 2;
const MAX_SECTIONS: usize = 256;

/// The parts of a VM that a snapshot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// Memory, registers and disks: a VM that goes on.
    Memory,
    /// Disks alone: a VM is booted with them.
    Disk,
}

impl SnapshotKind {
    /// Returns the kind in one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
        }
    }
}

/// The table of contents of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The name of the format: `pvmm-snapshot` in a folder, `pvmm-disks` in one without memory,
    /// `pvmm-files` in a state file.
    pub format: String,
    /// The version of the format; 1.
    pub version: u32,
    /// A random identifier, which stays when the snapshot is moved.
    pub id: String,
    /// The program that wrote the snapshot, with its version.
    pub created_by: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The features that a host must have to run the VM.
    pub machine: MachineFacts,
    /// The layout of guest memory.
    pub memory: MemoryFacts,
    /// The drives, in the guest's order; at most 16.
    pub disks: Vec<DiskFacts>,
    /// The tap interfaces of the network cards.
    pub taps: Vec<String>,
    /// The path of the guest's vsock socket.
    pub vsock_path: Option<String>,
    /// The table of the sections that hold registers and device states.
    pub sections: Vec<SectionFacts>,
    /// CRC-32 of this text with a zero here.
    pub checksum: u32,
}

/// The properties that a host must have to run the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineFacts {
    /// The architecture; `x86_64`.
    pub architecture: String,
    /// The module behind `/dev/kvm`.
    pub backend: String,
    /// The processor's vendor, as in CPUID leaf 0.
    pub cpu_vendor: String,
    /// Family, model and stepping, as in CPUID leaf 1.
    pub cpu_signature: u32,
    /// The name of the processor baseline that the VM was made for, and then family and model do
    /// not matter; left out for a VM that was offered all features of its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_baseline: Option<String>,
    /// The number of vCPUs, 1 to 32.
    pub vcpus: u32,
    /// Guest memory in MiB.
    pub memory_mib: u64,
}

/// The layout of guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryFacts {
    /// The size of guest memory in bytes.
    pub size: u64,
    /// Guest addresses and lengths; the regions follow each other in the file.
    pub regions: Vec<(u64, u64)>,
    /// The snapshot that holds the pages which this one does not.
    pub base: Option<BaseFacts>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseFacts {
    pub id: String,
    pub path: String,
}

/// One drive, in the order of the guest's drives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum DiskFacts {
    /// A file in this folder.
    Inside {
        /// The name of the file: `disk-N.img`, with the place of the drive from 0.
        file: String,
        /// The size in bytes.
        size: u64,
        /// The guest only reads the drive.
        read_only: bool,
    },
    /// A read-only image outside of the folder, with its size and time of change.
    Outside {
        /// The path, with symbolic links resolved.
        path: String,
        /// The size in bytes.
        size: u64,
        /// The time of the last modification, in nanoseconds since 1970.
        modified_ns: i128,
    },
    /// A file or device outside, used in place. Only in a state file, since a snapshot of two files
    /// holds no disk.
    Named {
        /// The absolute path; without one, every fork must be given another drive.
        path: Option<String>,
        /// The guest only reads the drive.
        read_only: bool,
    },
}

/// One section of `state.bin`. In JSON it is one line of kind, version, offset, length and
/// checksum: a table of objects would be most of the manifest and of the time to read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SectionFacts {
    pub kind: String,
    pub version: u32,
    pub offset: u64,
    pub len: u64,
    pub crc32: u32,
}

impl Manifest {
    /// Returns the text, with its checksum.
    pub fn encode(&self) -> Result<Vec<u8>, SnapshotError> {
        let plain = Self { checksum: 0, ..self.clone() }.text()?;
        Self { checksum: crc32fast::hash(&plain), ..self.clone() }.text()
    }

    /// Decodes and checks the manifest of a folder.
    pub fn decode(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let manifest = Self::decode_as(bytes, &[FORMAT, DISKS_FORMAT])?;
        if manifest.kind() == SnapshotKind::Disk && manifest.memory.base.is_some() {
            return Err(SnapshotError::Manifest("has a base, and no memory".into()));
        }
        if manifest.disks.iter().any(|disk| matches!(disk, DiskFacts::Named { .. })) {
            Err(SnapshotError::Manifest("a disk is in no folder".into()))
        } else {
            Ok(manifest)
        }
    }

    /// Decodes and checks the manifest of a state file.
    pub fn decode_files(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let manifest = Self::decode_as(bytes, &[FILES_FORMAT])?;
        let named = |disk: &DiskFacts| matches!(disk, DiskFacts::Named { .. });
        if manifest.memory.base.is_none() && manifest.disks.iter().all(named) {
            Ok(manifest)
        } else {
            Err(SnapshotError::Manifest("has parts that belong to a folder".into()))
        }
    }

    fn decode_as(bytes: &[u8], formats: &[&str]) -> Result<Self, SnapshotError> {
        let decoded = serde_json::from_slice(bytes);
        // A text that cannot be decoded may be of a later format, of which only the head is known.
        let head = match &decoded {
            Ok(Self { format, version, .. }) => Head { format: format.clone(), version: *version },
            Err(_) => serde_json::from_slice(bytes).map_err(bad)?,
        };
        if !formats.contains(&head.format.as_str()) {
            return Err(SnapshotError::Manifest(format!("is of format {:?}", cut(&head.format))));
        }
        if head.version != VERSION {
            return Err(SnapshotError::Version { found: head.version, known: VERSION });
        }
        let manifest = decoded.map_err(bad)?;
        if sum_without_itself(bytes, manifest.checksum) != Some(manifest.checksum) {
            return Err(SnapshotError::Manifest("does not match its checksum".into()));
        }
        manifest.check().map_err(|what| SnapshotError::Manifest(what.into()))?;
        Ok(manifest)
    }

    /// Returns which parts of a VM the snapshot holds.
    pub fn kind(&self) -> SnapshotKind {
        if self.format == DISKS_FORMAT { SnapshotKind::Disk } else { SnapshotKind::Memory }
    }

    /// Returns the regions of guest memory, in ascending order.
    pub fn regions(&self) -> Vec<Region> {
        let region = |(address, len): &(u64, u64)| Region { address: *address, len: *len };
        self.memory.regions.iter().map(region).collect()
    }

    fn text(&self) -> Result<Vec<u8>, SnapshotError> {
        let mut text = serde_json::to_vec_pretty(self).map_err(bad)?;
        text.push(b'\n');
        Ok(text)
    }

    fn check(&self) -> Result<(), &'static str> {
        is_id(&self.id).then_some(()).ok_or("id is not 32 hexadecimal digits")?;
        let machine = &self.machine;
        if machine.vcpus == 0 || machine.vcpus > MAX_VCPUS {
            return Err("number of vCPUs is impossible");
        }
        if machine.memory_mib > MAX_MEMORY_MIB || machine.memory_mib << 20 != self.memory.size {
            return Err("memory size is impossible");
        }
        check_regions(&self.memory.regions, self.memory.size)?;
        if self.disks.len() > MAX_DRIVES {
            return Err("there are too many disks");
        }
        for (index, disk) in self.disks.iter().enumerate() {
            if let DiskFacts::Inside { file, .. } = disk
                && *file != disk_file(index)
            {
                return Err("a disk's file has a wrong name");
            }
        }
        if let Some(base) = &self.memory.base
            && !is_id(&base.id)
        {
            return Err("id of the base is not 32 hexadecimal digits");
        }
        if self.taps.len() > MAX_VIRTIO {
            return Err("there are too many network cards");
        }
        if self.sections.len() > MAX_SECTIONS {
            return Err("there are too many sections");
        }
        Ok(())
    }
}

/// Checks that the regions are whole pages, ascending, disjoint and within the address space, and
/// that they add up to `size`.
pub fn check_regions(regions: &[(u64, u64)], size: u64) -> Result<(), &'static str> {
    let (mut end, mut sum) = (0u64, 0u64);
    if regions.is_empty() || regions.len() > MAX_REGIONS {
        return Err("number of memory regions is impossible");
    }
    for (index, (address, len)) in regions.iter().enumerate() {
        let whole = address.is_multiple_of(PAGE) && len.is_multiple_of(PAGE) && *len > 0;
        if !whole || (index > 0 && *address < end) {
            return Err("memory regions are not whole pages apart from each other");
        }
        end = address.checked_add(*len).ok_or("a memory region ends beyond all addresses")?;
        sum = sum.checked_add(*len).ok_or("memory regions are too large")?;
    }
    (sum == size).then_some(()).ok_or("memory regions do not add up")
}

impl Serialize for SectionFacts {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self { kind, version, offset, len, crc32 } = self;
        to.collect_str(&format_args!("{kind} {version} {offset} {len} {crc32}"))
    }
}

impl<'de> Deserialize<'de> for SectionFacts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_str(Section)
    }
}

struct Section;

impl<'de> Visitor<'de> for Section {
    type Value = SectionFacts;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("kind, version, offset, length and sum of a section")
    }

    fn visit_str<E: Error>(self, line: &str) -> Result<SectionFacts, E> {
        let mut words = line.split(' ');
        let mut section = || {
            Some(SectionFacts {
                kind: words.next()?.to_owned(),
                version: words.next()?.parse().ok()?,
                offset: words.next()?.parse().ok()?,
                len: words.next()?.parse().ok()?,
                crc32: words.next()?.parse().ok()?,
            })
        };
        match (section(), words.next()) {
            (Some(section), None) => Ok(section),
            _ => Err(E::invalid_value(serde::de::Unexpected::Str(line), &self)),
        }
    }
}

/// The fields that every version of the format has.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
}

/// Returns the checksum of a text as if its last value, the checksum, were zero.
fn sum_without_itself(text: &[u8], sum: u32) -> Option<u32> {
    let value = sum.to_string();
    let before = text.strip_suffix(b"\n}\n")?.strip_suffix(value.as_bytes())?;
    before.ends_with(b"\"checksum\": ").then_some(())?;
    let mut hasher = crc32fast::Hasher::new();
    [before, b"0\n}\n"].into_iter().for_each(|part| hasher.update(part));
    Some(hasher.finalize())
}

/// Returns the file name of a drive inside the folder.
pub fn disk_file(index: usize) -> String {
    format!("disk-{index}.img")
}

fn is_id(id: &str) -> bool {
    id.len() == ID_LEN && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn bad(error: serde_json::Error) -> SnapshotError {
    SnapshotError::Manifest(cut(&error.to_string()))
}

/// Shortens text from a file for an error message.
fn cut(text: &str) -> String {
    text.chars().take(120).collect()
}
