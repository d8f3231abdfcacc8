//! Passes a template from one process to another, as a message and open files.
//!
//! Nothing is written to disk and no page is copied: the other process maps the sealed memory of
//! this one. This is how the VMs of one fork become processes of their own.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pvmm_devices::virtio::block::io::LayeredDisk;
use serde::{Deserialize, Serialize};

use super::manifest::{SectionFacts, check_regions};
use super::read::check_runs;
use super::sections::{self, Saved, WorkingSetV1};
use super::{Base, SnapshotError};
use crate::config::MAX_MEMORY_MIB;
use crate::error::Error;
use crate::frozen::Frozen;
use crate::kvm::vm::Kvm;
use crate::memory::{Layer, MemoryImage, PageRanges, Region};
use crate::packed;
use crate::storage::FrozenStorage;

/// The most files that one message comes with: the kernel passes no more at once.
pub const MAX_FILES: usize = 250;

const MAX_MEMORY: u64 = MAX_MEMORY_MIB << 20;

type Ranges = Vec<(u64, u64)>;

#[derive(Serialize, Deserialize)]
struct Message {
    #[serde(with = "packed")]
    state: Vec<u8>,
    sections: Vec<SectionFacts>,
    regions: Vec<(u64, u64)>,
    /// The page ranges of each memory layer, lowest first. Each layer has one file.
    layers: Vec<Ranges>,
    /// Whether the sibling's file follows.
    sibling: bool,
    drives: Vec<DriveMessage>,
    taps: Vec<String>,
    vsock_path: Option<PathBuf>,
    base: Option<(String, PathBuf, usize)>,
    /// The number of lowest layers that belong to the base.
    base_layers: usize,
    /// Whether the template has no memory: one of disks alone, or one for page servers.
    without_memory: bool,
}

#[derive(Serialize, Deserialize)]
enum DriveMessage {
    /// One file.
    Fixed {
        path: Option<PathBuf>,
    },
    /// One file per layer, with the ranges it holds, or `None` if it holds all.
    Layers(Vec<Option<Ranges>>),
    /// No file: each VM opens the drive by its path.
    Named {
        path: Option<PathBuf>,
        read_only: bool,
    },
    Missing {
        path: PathBuf,
        allowed: bool,
    },
}

/// Returns the message and the files from which another process makes this template.
pub fn hand_over(frozen: &Frozen) -> Result<(Vec<u8>, Vec<OwnedFd>), Error> {
    let failed = |source| SnapshotError::Write { file: "hand-over".into(), source };
    let saved = Saved {
        machine: (*frozen.state).clone(),
        sums: Vec::new(),
        runs: Vec::new(),
        working_set: frozen.working_set.as_deref().map(WorkingSetV1::of),
        note: Some(frozen.note.clone()).filter(|note| !note.is_empty()),
        stamps: Vec::new(),
    };
    let (state, sections) = sections::encode(&saved)?;
    let mut files = Vec::new();
    let mut layers = Vec::new();
    for layer in frozen.image.layers() {
        files.push(layer.file.try_clone().map_err(failed)?.into());
        layers.push(layer.runs.iter().map(|run| (run.start, run.end)).collect());
    }
    if let Some(sibling) = frozen.image.dedup_source() {
        files.push(sibling.try_clone().map_err(failed)?.into());
    }
    let mut drives = Vec::new();
    for drive in &frozen.drives {
        drives.push(match drive {
            FrozenStorage::Fixed { file, path } => {
                files.push(file.try_clone().map_err(failed)?.into());
                DriveMessage::Fixed { path: path.clone() }
            }
            FrozenStorage::Layers(disk) => {
                let mut ranges = Vec::new();
                for (file, range) in disk.frozen_layers().map_err(failed)? {
                    files.push(file.into());
                    ranges.push(range);
                }
                DriveMessage::Layers(ranges)
            }
            FrozenStorage::Named { path, read_only } => {
                DriveMessage::Named { path: path.clone(), read_only: *read_only }
            }
            FrozenStorage::Missing { path, allowed, .. } => {
                DriveMessage::Missing { path: path.clone(), allowed: *allowed }
            }
        });
    }
    if files.len() > MAX_FILES {
        let source = std::io::Error::other(format!("{} files are too many", files.len()));
        return Err(failed(source).into());
    }
    let message = Message {
        state,
        sections,
        regions: frozen.image.regions().iter().map(|r| (r.address, r.len)).collect(),
        layers,
        sibling: frozen.image.dedup_source().is_some(),
        drives,
        taps: frozen.taps.clone(),
        vsock_path: frozen.vsock_path.clone(),
        base: frozen.base.as_ref().map(|b| (b.id.clone(), b.dir.clone(), b.depth)),
        base_layers: frozen.image.base_layers(),
        without_memory: frozen.without_memory,
    };
    let bytes =
        rmp_serde::to_vec(&message).map_err(|error| failed(std::io::Error::other(error)))?;
    Ok((bytes, files))
}

/// The template that another process handed over.
pub fn take_over(kvm: &Kvm, bytes: &[u8], files: Vec<OwnedFd>) -> Result<Frozen, Error> {
    let bad = |what: &str| SnapshotError::State(format!("hand-over: {what}"));
    let message: Message = rmp_serde::from_slice(bytes).map_err(|e| bad(&e.to_string()))?;
    let mut files = files.into_iter().map(File::from);
    let mut next = || files.next().ok_or_else(|| bad("a file is missing"));
    let saved = sections::decode(&message.state, &message.sections)?;

    let total = |sum: u64, (_, len): &(u64, u64)| sum.checked_add(*len);
    let size = message.regions.iter().try_fold(0, total).filter(|size| *size <= MAX_MEMORY);
    let size = size.ok_or_else(|| bad("memory is impossibly large"))?;
    check_regions(&message.regions, size).map_err(bad)?;
    let region = |(address, len): &(u64, u64)| Region { address: *address, len: *len };
    let mut image = MemoryImage::empty(message.regions.iter().map(region).collect());
    for runs in &message.layers {
        let file = next()?;
        // Memory that is mapped past the end of its file kills whoever touches it.
        let len = file.metadata().map(|facts| facts.len());
        let end = runs.last().map_or(0, |(_, end)| *end);
        if !len.is_ok_and(|len| len >= end) {
            return Err(bad("a layer of memory is shorter than it says").into());
        }
        let runs = match runs.as_slice() {
            [(0, end)] if *end == size => PageRanges::all(size),
            runs => check_runs(runs, size)?,
        };
        image = image.with(Layer::new(file.into(), runs));
    }
    if message.base_layers > message.layers.len() {
        return Err(bad("the base has more layers than there are").into());
    }
    let sibling = message.sibling.then(&mut next).transpose()?.map(Arc::new);
    image = image.on_base(message.base_layers).with_dedup_file(sibling);
    let working_set = saved.working_set.as_ref().map(|set| set.check(size)).transpose()?;
    let mut drives = Vec::new();
    for (index, drive) in message.drives.into_iter().enumerate() {
        drives.push(match drive {
            DriveMessage::Fixed { path } => FrozenStorage::Fixed { file: next()?, path },
            DriveMessage::Layers(ranges) => {
                let mut layers = Vec::new();
                for range in ranges {
                    layers.push((next()?, range));
                }
                let top = crate::memory::memfd(c"pvmm-disk", 0)
                    .map_err(|source| SnapshotError::Read { file: "disk".into(), source })?;
                let disk = LayeredDisk::from_frozen(layers, top)
                    .map_err(|source| SnapshotError::Read { file: "disk".into(), source })?;
                FrozenStorage::Layers(disk)
            }
            DriveMessage::Named { path, read_only } => FrozenStorage::Named { path, read_only },
            DriveMessage::Missing { path, allowed } => {
                FrozenStorage::Missing { index, path, allowed }
            }
        });
    }
    Ok(Frozen {
        host: kvm.0.clone(),
        state: Arc::new(saved.machine),
        image,
        drives,
        taps: message.taps,
        vsock_path: message.vsock_path,
        base: message.base.map(|(id, dir, depth)| Base { id, dir, depth }),
        working_set: working_set.map(Arc::new),
        without_memory: message.without_memory,
        note: saved.note.unwrap_or_default(),
        memory_sums: None,
        pause: Duration::ZERO,
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing;
    use super::*;

    /// A template of one layer of 1 MiB, after `change`.
    fn message(change: impl FnOnce(&mut Message)) -> Vec<u8> {
        let (state, sections) = sections::encode(&testing::saved()).unwrap();
        let mut message = Message {
            state,
            sections,
            regions: vec![(0, 1 << 20)],
            layers: vec![vec![(0, 1 << 20)]],
            sibling: false,
            drives: Vec::new(),
            taps: Vec::new(),
            vsock_path: None,
            base: None,
            base_layers: 0,
            without_memory: false,
        };
        change(&mut message);
        rmp_serde::to_vec(&message).unwrap()
    }

    fn refused(len: u64, change: impl FnOnce(&mut Message)) -> String {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        let taken = take_over(&Kvm::open().unwrap(), &message(change), vec![file.into()]);
        format!("{:#}", taken.err().expect("should be refused"))
    }

    #[test]
    fn handed_over_regions_that_overflow_or_are_impossible_are_refused() {
        let (page, half) = (4096, 1 << 63);
        for regions in [
            vec![(0, half), (half, half)],
            vec![(0, u64::MAX - 4095), (1 << 40, page)],
            vec![(0, 1 << 60)],
            vec![(u64::MAX - 4095, page)],
            vec![(0, page), (0, page)],
            vec![(1, page)],
            vec![(0, 0)],
            Vec::new(),
        ] {
            let error = refused(1 << 20, |message| message.regions = regions.clone());
            assert!(error.contains("hand-over"), "{regions:?}: {error}");
        }
    }

    #[test]
    fn handed_over_layer_shorter_than_its_ranges_is_refused() {
        let error = refused((1 << 20) - 1, |_| {});
        assert!(error.contains("shorter than it says"), "{error}");
        let error = refused(4096, |message| message.layers = vec![vec![(0, 4096), (8192, 12288)]]);
        assert!(error.contains("shorter than it says"), "{error}");
        let error = refused(1 << 20, |message| message.base_layers = 2);
        assert!(error.contains("more layers"), "{error}");
    }

    #[test]
    fn handed_over_disk_layer_shorter_than_its_ranges_is_refused() {
        let whole = |len| {
            let file = tempfile::tempfile().unwrap();
            file.set_len(len).unwrap();
            OwnedFd::from(file)
        };
        let bytes = message(|message| {
            let layers = vec![None, Some(vec![(0, 8192)])];
            message.drives = vec![DriveMessage::Layers(layers)];
        });
        let taken = take_over(
            &Kvm::open().unwrap(),
            &bytes,
            vec![whole(1 << 20), whole(16384), whole(4096)],
        );
        let error = format!("{:#}", taken.err().expect("should be refused"));
        assert!(error.contains("a layer is shorter than its ranges"), "{error}");
    }
}
