//! The memory image: copy-on-write layers that never change, and how guests map them.
//!
//! A layer is a file and the page ranges that it covers. The lowest layers are the memory of a
//! snapshot and of its bases; without one the image is empty and reads as zeros. Each freeze adds
//! the dirty pages of a guest as a layer, or merges all layers with them into one if there would be
//! more than [`MAX_LAYERS`]. Mapping an image copies nothing, so any number of guests share it.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock, Weak};

use pvmm_devices::{GuestMemory, sparse};
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MmapRegion};

use super::background_copy::BackgroundCopy;
use super::{PAGE, PageRanges, TRIM_MAX, pages, sys};
use crate::error::{Error, ErrorKind};
use crate::thread_filters::SystemCallFilter;

/// The most page ranges of one layer: each is a mapping, and a process may have 65,530 in all.
pub const MAX_RUNS: usize = 2048;
/// Gaps up to this size between two dirty ranges are copied with them by a background copy: each
/// range is a mapping in every fork, which costs more than a few pages once. A guest that waits for
/// the copy is spared that.
const GAP: u64 = 32 * PAGE;
/// How much of its dirty memory a guest is expected to write again at once: more than a first
/// command writes, and little enough to keep.
pub const REWRITTEN_MAX: u64 = 2 << 20;
/// The size of a huge page, and of the blocks in which an image is searched for holes: each hole is
/// a mapping in every VM.
pub const HUGE_PAGE: u64 = 2 << 20;
/// The most layers of one image.
pub const MAX_LAYERS: usize = 16;

/// Failures of guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("cannot map {mib} MiB")]
    Map { mib: u64, source: io::Error },
    #[error("cannot list the pages that the guest has changed")]
    Scan(#[source] io::Error),
    #[error("cannot keep the pages that the guest has changed")]
    Keep(#[source] io::Error),
    #[error("cannot write the memory")]
    Write(#[source] io::Error),
    #[error("cannot drop the pages that the guest has changed")]
    Discard(#[source] io::Error),
    #[error("regions do not fit together")]
    Regions,
}

impl MemoryError {
    /// Returns whose fault the error is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Regions => ErrorKind::SnapshotCorrupt,
            Self::Map { .. }
            | Self::Scan(_)
            | Self::Keep(_)
            | Self::Write(_)
            | Self::Discard(_) => ErrorKind::HostResource,
        }
    }
}

impl From<MemoryError> for Error {
    fn from(error: MemoryError) -> Self {
        Self::new(error.kind(), "memory", error)
    }
}

/// A range of guest addresses. In the image, regions follow each other without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub address: u64,
    pub len: u64,
}

/// One file of an image and the page ranges that it covers.
pub struct Layer {
    pub file: Arc<File>,
    pub runs: PageRanges,
    /// The parts of the file that have data, once they were searched: a layer never changes.
    data: OnceLock<PageRanges>,
}

/// Layers of memory that never change.
#[derive(Clone)]
pub struct MemoryImage {
    regions: Arc<[Region]>,
    layers: Vec<Arc<Layer>>,
    /// The number of lowest layers that are those of the snapshot below.
    base_layers: usize,
    /// The unbacked ranges, once they were searched.
    unbacked: Arc<OnceLock<PageRanges>>,
    /// The dirty pages of a recorded VM of this image, after its first use; holes elsewhere.
    dedup_source: Option<Arc<File>>,
}

impl MemoryImage {
    /// An image without layers, which reads as zeros.
    pub fn empty(regions: Vec<Region>) -> Self {
        let (regions, unbacked) = (regions.into(), Arc::default());
        Self { regions, layers: Vec::new(), base_layers: 0, unbacked, dedup_source: None }
    }

    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    /// Returns the size of guest memory in bytes.
    pub fn size(&self) -> u64 {
        self.regions.iter().map(|region| region.len).sum()
    }

    /// Returns the image with a layer on top.
    #[must_use]
    pub fn with(&self, layer: Layer) -> Self {
        let unbacked =
            self.unbacked.get().map(|unbacked| unbacked.difference(&layer.runs.blocks(HUGE_PAGE)));
        let mut layers = self.layers.clone();
        layers.push(Arc::new(layer));
        Self {
            regions: self.regions.clone(),
            layers,
            base_layers: self.base_layers,
            unbacked: Arc::new(unbacked.map_or_else(OnceLock::new, OnceLock::from)),
            dedup_source: None,
        }
    }

    /// Returns the image with a layer on top that covers everything.
    #[must_use]
    pub fn with_file(&self, file: Arc<File>) -> Self {
        self.with(Layer::new(file, PageRanges::all(self.size())))
    }

    /// Returns the image with the `changed` pages of `guest` as the source for page dedup. The
    /// guest must be paused.
    pub fn with_dedup_source(
        &self,
        guest: &GuestMemory,
        changed: &PageRanges,
    ) -> Result<Self, MemoryError> {
        let file = sealed_memfd(self.size(), |file| {
            changed.iter().try_for_each(|run| pages::write_run(guest, run, file))
        });
        Ok(self.clone().with_dedup_file(Some(file?.into())))
    }

    #[must_use]
    pub fn with_dedup_file(self, dedup_source: Option<Arc<File>>) -> Self {
        Self { dedup_source, ..self }
    }

    pub fn dedup_source(&self) -> Option<&Arc<File>> {
        self.dedup_source.as_ref()
    }

    /// Returns the ranges, in huge pages, for which no layer has data; none where a file cannot
    /// tell its holes.
    pub fn unbacked(&self) -> &PageRanges {
        self.unbacked.get_or_init(|| self.find_unbacked().unwrap_or_default())
    }

    fn find_unbacked(&self) -> io::Result<PageRanges> {
        let mut used = Vec::new();
        for layer in &self.layers {
            for run in layer.runs.iter() {
                used.extend(sparse::blocks_with_data(&layer.file, run, HUGE_PAGE)?);
            }
        }
        Ok(PageRanges::all(self.size()).difference(&PageRanges::merged(used)))
    }

    /// Returns the image, whose `layers` lowest layers are those of a snapshot.
    #[must_use]
    pub fn on_base(self, layers: usize) -> Self {
        Self { base_layers: layers.min(self.layers.len()), ..self }
    }

    pub fn base_layers(&self) -> usize {
        self.base_layers
    }

    /// Returns whether both have the very same layers.
    pub fn has_same_layers(&self, other: &Self) -> bool {
        let same = |(one, other): (&Arc<Layer>, &Arc<Layer>)| Arc::ptr_eq(one, other);
        self.layers.len() == other.layers.len() && self.layers.iter().zip(&other.layers).all(same)
    }

    /// Returns whether this image is `below` and one layer more.
    pub fn is_layer_over(&self, below: &Self) -> bool {
        self.layers.len() == below.layers.len() + 1
            && self.layers.iter().zip(&below.layers).all(|(one, other)| Arc::ptr_eq(one, other))
    }

    /// Maps this image in place of all memory of `guest`, whose dirty pages are lost. The guest
    /// must be paused.
    pub fn remap(&self, guest: &GuestMemory) -> Result<(), MemoryError> {
        pages::map_zeros(guest, 0..self.size()).map_err(MemoryError::Discard)?;
        self.layers.iter().try_for_each(|layer| layer.map_into(guest))
    }

    /// Reverts the `private` pages of `guest`, which is mapped over this image. Short ranges, which
    /// its kernel and agent write all the time, are rewritten in place, which saves the guest a
    /// fault on each page; the others are discarded. The guest must be paused.
    pub fn revert_dirty_pages(&self, guest: &GuestMemory, private: &PageRanges) -> io::Result<()> {
        let (mut kept, _) = private.shortest(REWRITTEN_MAX);
        pages::discard(guest, &private.difference(&kept).at_most(MAX_RUNS))?;
        for layer in self.layers.iter().rev() {
            for run in kept.intersection(&layer.runs).iter() {
                pages::read_run(guest, run, &layer.file)?;
            }
            kept = kept.difference(&layer.runs);
        }
        kept.iter().for_each(|run| pages::zero_run(guest, run));
        Ok(())
    }

    /// Maps the image for one guest: a page that is written becomes private to the mapping. In
    /// `huge`, for which no layer has data, memory is anonymous and comes in huge pages.
    pub fn map(&self, huge: &PageRanges) -> Result<GuestMemory, MemoryError> {
        let mut regions = Vec::with_capacity(self.regions.len());
        for region in self.regions.iter() {
            let failed = |source| MemoryError::Map { mib: region.len >> 20, source };
            // Anonymous first, whatever lies over it: the kernel aligns that to huge pages.
            let mapping = map_anonymous(region.len as usize).map_err(failed)?;
            let mapped = GuestRegionMmap::new(mapping, GuestAddress(region.address));
            regions.push(mapped.ok_or(MemoryError::Regions)?);
        }
        let guest = GuestMemory::from_regions(regions).map_err(|_| MemoryError::Regions)?;
        if huge.count() > 0 {
            // Only a help: without huge pages the host supplies small ones. A layer that is mapped
            // over this does not keep it.
            let _ = pages::advise(&guest, 0..self.size(), libc::MADV_HUGEPAGE);
            for small in self.unbacked().difference(huge).iter() {
                let _ = pages::advise(&guest, small, libc::MADV_NOHUGEPAGE);
            }
        }
        for layer in &self.layers {
            layer.map_ranges(&guest, &layer.runs.difference(huge))?;
        }
        Ok(guest)
    }

    /// Returns the image with the dirty pages of `guest`, which are in `runs`, as a layer. The
    /// guest must be paused.
    pub fn with_dirty_pages(
        &self,
        guest: &GuestMemory,
        runs: &PageRanges,
    ) -> Result<Self, MemoryError> {
        if self.layers.len() < MAX_LAYERS {
            self.layered(guest, runs).map_err(MemoryError::Keep)
        } else {
            self.flattened(guest, runs).map_err(MemoryError::Keep)
        }
    }

    fn layered(&self, guest: &GuestMemory, runs: &PageRanges) -> io::Result<Self> {
        let runs = runs.at_most(MAX_RUNS);
        let file = sys::memfd(c"pvmm-memory", self.size())?;
        for run in runs.iter() {
            pages::write_run(guest, run, &file)?;
        }
        sys::seal(&file)?;
        Ok(self.with(Layer::new(file.into(), runs)))
    }

    /// Begins a background copy of the pages of `guest` that are in `written`. The guest must be
    /// paused for this call, and may run afterwards. Returns `None` where only
    /// [`Self::with_dirty_pages`] can do it.
    pub fn begin_freeze(
        &self,
        guest: &GuestMemory,
        written: &PageRanges,
        filter: Option<&SystemCallFilter>,
    ) -> io::Result<Option<Freezing>> {
        if self.layers.len() >= MAX_LAYERS {
            return Ok(None);
        }
        let runs = written.joined(GAP).at_most(MAX_RUNS);
        let file = sys::memfd(c"pvmm-memory", self.size())?;
        match BackgroundCopy::start(guest, &runs, &file, filter) {
            Ok(background_copy) => {
                let (written, below) = (written.clone(), self.clone());
                Ok(Some(Freezing {
                    written,
                    below,
                    layer: Layer::new(file.into(), runs),
                    background_copy,
                }))
            }
            // A jail may forbid new processes, and there may be no room for one.
            Err(_) => Ok(None),
        }
    }

    /// Copies all layers and the dirty pages into one layer, when there are too many to add one.
    fn flattened(&self, guest: &GuestMemory, runs: &PageRanges) -> io::Result<Self> {
        let file = sys::memfd(c"pvmm-memory", self.size())?;
        self.write_to(&file)?;
        for run in runs.iter() {
            // Zeros are not written, and they hide what a lower layer had.
            sparse::punch(&file, run.clone())?;
            pages::write_run(guest, run, &file)?;
        }
        sys::seal(&file)?;
        Ok(Self::empty(self.regions.to_vec()).with_file(file.into()))
    }

    /// Maps the top layer in place of what `guest` has in its ranges.
    pub fn map_top_layer_into(&self, guest: &GuestMemory) -> Result<(), MemoryError> {
        self.layers.last().map_or(Ok(()), |layer| layer.map_into(guest))
    }

    /// Copies all layers into one sealed memfd.
    pub fn copy_to_memfd(&self) -> Result<Self, MemoryError> {
        let size = self.size();
        let file = sealed_memfd(size, |file| self.write_to(file))?;
        // A trim does not compare more than this.
        let is_small = |sibling: &&Arc<File>| {
            let data = sparse::data(sibling, 0..size).map(PageRanges::merged);
            data.is_ok_and(|data| data.bytes() <= TRIM_MAX)
        };
        let hold = |sibling| sealed_memfd(size, |file| sparse::copy(sibling, file, 0..size)).ok();
        let sibling = self.dedup_source.as_ref().filter(is_small).and_then(|file| hold(file));
        let held = Self::empty(self.regions.to_vec()).with_file(file.into());
        let held = held.with_dedup_file(sibling.map(Arc::new));
        // The copy is the snapshot's memory if all layers were.
        let all_base = self.base_layers == self.layers.len();
        Ok(held.on_base(usize::from(all_base && self.base_layers > 0)))
    }

    /// Copies all layers into one file, lowest first, without their holes.
    fn write_to(&self, file: &File) -> io::Result<()> {
        for (index, layer) in self.layers.iter().enumerate() {
            for run in layer.runs.iter() {
                if index > 0 {
                    sparse::punch(file, run.clone())?;
                }
                sparse::copy(&layer.file, file, run)?;
            }
        }
        Ok(())
    }

    /// Reads from the layers from `first` on, at offset `at`, with zeros where they have no data.
    /// Returns the number of bytes that were no hole.
    pub fn read(&self, first: usize, at: u64, bytes: &mut [u8]) -> io::Result<u64> {
        let range = at..at + bytes.len() as u64;
        let place = |part: &Range<u64>| (part.start - at) as usize..(part.end - at) as usize;
        let mut data = Vec::new();
        let mut left = PageRanges::one(range.clone());
        for layer in self.layers.iter().skip(first).rev() {
            let own = layer.runs.clip(&range);
            let filled = layer.data(self.size())?.clip(&range);
            for part in left.intersection(&own).intersection(&filled).iter() {
                let bytes = bytes.get_mut(place(&part)).unwrap_or_default();
                layer.file.read_exact_at(bytes, part.start)?;
                data.push(part);
            }
            left = left.difference(&own);
        }
        let data = PageRanges::merged(data);
        for hole in PageRanges::one(range).difference(&data).iter() {
            bytes.get_mut(place(&hole)).unwrap_or_default().fill(0);
        }
        Ok(data.bytes())
    }

    /// Reads all layers at offset `at`, their holes too: for short ranges in a pause of the guest,
    /// in which a search for holes would take longer than to read them.
    fn read_plain(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.fill(0);
        let range = at..at + bytes.len() as u64;
        let mut left = PageRanges::one(range.clone());
        for layer in self.layers.iter().rev() {
            let own = layer.runs.clip(&range);
            for run in left.intersection(&own).iter() {
                let place = (run.start - at) as usize..(run.end - at) as usize;
                let bytes = bytes.get_mut(place).unwrap_or_default();
                layer.file.read_exact_at(bytes, run.start)?;
            }
            left = left.difference(&own);
        }
        Ok(())
    }

    /// Returns the pages of `runs` that are equal in `guest` and in the image. The guest must be
    /// paused.
    pub fn unchanged(&self, guest: &GuestMemory, runs: &PageRanges) -> io::Result<PageRanges> {
        let mut same = PageRanges::default();
        let (mut own, mut theirs) = (Vec::new(), Vec::new());
        for run in runs.iter() {
            for (address, part) in pages::guest_parts(guest, run) {
                let len = (part.end - part.start) as usize;
                own.resize(len, 0);
                theirs.resize(len, 0);
                self.read_plain(part.start, &mut own)?;
                guest.read_slice(&mut theirs, GuestAddress(address)).map_err(io::Error::other)?;
                let both = own.chunks(PAGE as usize).zip(theirs.chunks(PAGE as usize));
                for (start, (own, theirs)) in (part.start..).step_by(PAGE as usize).zip(both) {
                    if own == theirs {
                        same.push(start..start + PAGE);
                    }
                }
            }
        }
        Ok(same)
    }

    /// Returns the ranges that the layers from `first` on cover.
    pub fn runs_from(&self, first: usize) -> Vec<(u64, u64)> {
        let layers = self.layers.iter().skip(first);
        let mut all: Vec<_> = layers.flat_map(|layer| layer.runs.iter()).collect();
        all.sort_by_key(|run| run.start);
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for run in all {
            match joined.last_mut() {
                Some(last) if run.start <= last.1 => last.1 = last.1.max(run.end),
                _ => joined.push((run.start, run.end)),
            }
        }
        joined
    }
}

/// A memory image that is being made while its guest runs.
pub struct Freezing {
    /// The dirty pages of the guest.
    pub written: PageRanges,
    below: MemoryImage,
    layer: Layer,
    background_copy: BackgroundCopy,
}

impl Freezing {
    /// Returns the file that the pages are copied to.
    pub fn file(&self) -> Weak<File> {
        Arc::downgrade(&self.layer.file)
    }

    /// Waits for the copy and returns the image.
    pub fn finish(self) -> Result<MemoryImage, MemoryError> {
        let finish = || -> io::Result<()> {
            self.background_copy.finish()?;
            sys::seal(&self.layer.file)
        };
        finish().map_err(MemoryError::Keep)?;
        Ok(self.below.with(self.layer))
    }
}

/// Makes a sealed memfd of what `fill` writes.
fn sealed_memfd(
    size: u64,
    fill: impl FnOnce(&File) -> io::Result<()>,
) -> Result<File, MemoryError> {
    let keep = || -> io::Result<File> {
        let file = sys::memfd(c"pvmm-memory", size)?;
        fill(&file)?;
        sys::seal(&file)?;
        Ok(file)
    };
    keep().map_err(MemoryError::Keep)
}

/// Maps zeros for one guest.
fn map_anonymous(len: usize) -> io::Result<MmapRegion> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    MmapRegion::build(None, len, protection, flags).map_err(io::Error::other)
}

impl Layer {
    /// A layer of a file that does not change, of which it covers `runs`.
    pub fn new(file: Arc<File>, runs: PageRanges) -> Self {
        Self { file, runs, data: OnceLock::new() }
    }

    /// Returns the parts of the file that have data, all of its `size` bytes if it cannot tell.
    pub fn data(&self, size: u64) -> io::Result<&PageRanges> {
        if let Some(data) = self.data.get() {
            return Ok(data);
        }
        let data = PageRanges::merged(sparse::data(&self.file, 0..size)?);
        Ok(self.data.get_or_init(|| data))
    }

    /// Returns how many bytes the ranges have, holes of the file included.
    pub fn range_bytes(&self) -> u64 {
        self.runs.bytes()
    }

    /// Maps the layer's ranges in place of what `guest` has there. The guest must be paused or not
    /// have run.
    pub fn map_into(&self, guest: &GuestMemory) -> Result<(), MemoryError> {
        self.map_ranges(guest, &self.runs)
    }

    fn map_ranges(&self, guest: &GuestMemory, runs: &PageRanges) -> Result<(), MemoryError> {
        for run in runs.iter() {
            let mib = (run.end - run.start) >> 20;
            pages::map_file(guest, run, &self.file)
                .map_err(|source| MemoryError::Map { mib, source })?;
        }
        Ok(())
    }
}
