//! What a snapshot says of itself, as JSON that people and other programs can read.
//!
//! The text is canonical: what is read must be byte for byte what would be written, so that there is one
//! manifest for one meaning, and a checksum over it.

use std::fmt;
use std::ops::RangeInclusive;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::SnapshotError;
use crate::config::{MAX_DRIVES, MAX_MEMORY_MIB, MAX_VCPUS};
use crate::machine::MAX_VIRTIO;
use crate::memory::{PAGE, Region};

pub const FORMAT: &str = "pvmm-snapshot";
/// Of the state file of two files; a folder is never mistaken for one.
pub const FILES_FORMAT: &str = "pvmm-files";
/// In the first, a section was an object.
pub const VERSION: u32 = 2;
const VERSIONS: RangeInclusive<u32> = 1..=VERSION;
const ID_LEN: usize = 32;
const MAX_REGIONS: usize = 2;
const MAX_SECTIONS: usize = 256;

/// The table of contents of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub format: String,
    pub version: u32,
    /// Random; names this snapshot wherever it is moved.
    pub id: String,
    pub created_by: String,
    /// Seconds since 1970.
    pub created: u64,
    pub machine: MachineFacts,
    pub memory: MemoryFacts,
    pub disks: Vec<DiskFacts>,
    /// The interfaces that the network cards were connected to.
    pub taps: Vec<String>,
    /// Where the guest's socket was.
    pub vsock_path: Option<String>,
    pub sections: Vec<SectionFacts>,
    /// CRC-32 of this text with a zero here.
    pub checksum: u32,
}

/// What a host must be like to go on with the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineFacts {
    pub architecture: String,
    /// The module behind `/dev/kvm`.
    pub backend: String,
    pub cpu_vendor: String,
    /// Family, model and stepping, as leaf 1 of `cpuid` has them.
    pub cpu_signature: u32,
    pub vcpus: u32,
    pub memory_mib: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryFacts {
    pub size: u64,
    /// Guest addresses and lengths; their bytes follow each other in the file.
    pub regions: Vec<(u64, u64)>,
    /// The snapshot that holds the pages which are not in this one.
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
    /// In this folder.
    Inside { file: String, size: u64, read_only: bool },
    /// A read-only image elsewhere, and how it looked.
    Outside { path: String, size: u64, modified_ns: i128 },
    /// A file or device elsewhere, used in place. Only in the state file of two files, which hold no disk.
    Named { path: Option<String>, read_only: bool },
}

/// One part of `state.bin`. It stands in a line, kind, version, offset, length and sum: a table of objects would be most
/// of the manifest, and of the time that reading it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SectionFacts {
    pub kind: String,
    pub version: u32,
    pub offset: u64,
    pub len: u64,
    pub crc32: u32,
}

impl Manifest {
    /// The text, with its checksum.
    pub fn encode(&self) -> Result<Vec<u8>, SnapshotError> {
        let plain = Self { checksum: 0, ..self.clone() }.text()?;
        Self { checksum: crc32fast::hash(&plain), ..self.clone() }.text()
    }

    /// Reads and checks a text.
    pub fn decode(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let manifest = Self::decode_as(bytes, FORMAT)?;
        match manifest.disks.iter().any(|disk| matches!(disk, DiskFacts::Named { .. })) {
            true => Err(SnapshotError::Manifest("a disk is in no folder".into())),
            false => Ok(manifest),
        }
    }

    /// The same for a state file.
    pub fn decode_files(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let manifest = Self::decode_as(bytes, FILES_FORMAT)?;
        let named = |disk: &DiskFacts| matches!(disk, DiskFacts::Named { .. });
        match manifest.memory.base.is_none() && manifest.disks.iter().all(named) {
            true => Ok(manifest),
            false => Err(SnapshotError::Manifest("has parts that belong to a folder".into())),
        }
    }

    fn decode_as(bytes: &[u8], format: &str) -> Result<Self, SnapshotError> {
        let decoded = serde_json::from_slice(bytes);
        // What cannot be read may be of a later format, of which only the head is known.
        let head = match &decoded {
            Ok(Self { format, version, .. }) => Head { format: format.clone(), version: *version },
            Err(_) => serde_json::from_slice(bytes).map_err(bad)?,
        };
        if head.format != format {
            return Err(SnapshotError::Manifest(format!("is of format {:?}", cut(&head.format))));
        }
        if !VERSIONS.contains(&head.version) {
            return Err(SnapshotError::Version { found: head.version, known: VERSION });
        }
        let manifest = decoded.map_err(bad)?;
        if sum_without_itself(bytes, manifest.checksum) != Some(manifest.checksum) {
            return Err(SnapshotError::Manifest("does not match its checksum".into()));
        }
        manifest.check().map_err(|what| SnapshotError::Manifest(what.into()))?;
        Ok(manifest)
    }

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

/// Whole pages, ascending, apart, below the end of addresses, as much as the memory is.
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
        from.deserialize_any(Section)
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

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<SectionFacts, A::Error> {
        #[derive(Deserialize)]
        #[serde(remote = "SectionFacts", deny_unknown_fields)]
        struct Object {
            kind: String,
            version: u32,
            offset: u64,
            len: u64,
            crc32: u32,
        }
        Object::deserialize(MapAccessDeserializer::new(object))
    }
}

/// What every format says of itself.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u32,
}

/// The sum of a text as if its last value, which is the sum, were zero.
fn sum_without_itself(text: &[u8], sum: u32) -> Option<u32> {
    let value = sum.to_string();
    let before = text.strip_suffix(b"\n}\n")?.strip_suffix(value.as_bytes())?;
    before.ends_with(b"\"checksum\": ").then_some(())?;
    let mut hasher = crc32fast::Hasher::new();
    [before, b"0\n}\n"].into_iter().for_each(|part| hasher.update(part));
    Some(hasher.finalize())
}

/// How the file of a drive inside the folder is called.
pub fn disk_file(index: usize) -> String {
    format!("disk-{index}.img")
}

fn is_id(id: &str) -> bool {
    id.len() == ID_LEN && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn bad(error: serde_json::Error) -> SnapshotError {
    SnapshotError::Manifest(cut(&error.to_string()))
}

/// Text from a file, short enough for a message.
fn cut(text: &str) -> String {
    text.chars().take(120).collect()
}
