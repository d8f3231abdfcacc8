//! What lies under a guest's memory: files that never change, one over the other.
//!
//! The lowest layer is a snapshot's memory or nothing, which reads as zeros; each layer above holds
//! the pages that differ. Mapping an image copies nothing, so any number of guests share its pages.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};

use pvmm_devices::{GuestMemory, sparse};
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MmapRegion};

use super::background_copy::BackgroundCopy;
use super::rollback_set::RollbackWorkingSet;
use super::{PAGE, PageRanges, Pages, TRIM_MAX, pages, sys};
use crate::error::{Error, ErrorKind};

/// The most pieces of one layer: a process may have 65,530 mappings in all.
pub const MAX_RUNS: usize = 2048;
/// Gaps up to this size between two changed pieces are copied with them beside the guest: each
/// piece is a mapping in every child, which costs more than a few pages once. A guest that waits
/// for the copy is spared that.
const GAP: u64 = 32 * PAGE;
/// How much of what a guest has written it is expected to write again at once: more than a first
/// command does, and little enough to keep.
pub const REWRITTEN_MAX: u64 = 2 << 20;
/// The size of a huge page, and of the blocks in which an image is searched for holes: each hole is
/// a mapping in every VM.
pub const HUGE_PAGE: u64 = 2 << 20;
/// The most layers of one image.
pub const MAX_LAYERS: usize = 16;

/// What failed with a guest's memory.
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
    /// Whose fault the error is.
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

/// A range of guest addresses; its bytes follow those of the region before it in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    pub address: u64,
    pub len: u64,
}

/// One file of an image and the ranges for which it speaks.
pub struct Layer {
    pub file: Arc<File>,
    pub runs: PageRanges,
}

/// Memory that never changes.
#[derive(Clone)]
pub struct MemoryImage {
    regions: Arc<[Region]>,
    layers: Vec<Arc<Layer>>,
    /// How many of the lowest layers are those of the snapshot that the image goes on from.
    base_layers: usize,
    /// The long stretches of nothing but zeros, once somebody has asked.
    unbacked: Arc<OnceLock<PageRanges>>,
    /// What a machine that lay over this had changed after its first use; of the size of all, with
    /// holes elsewhere.
    sibling: Option<Arc<File>>,
}

impl MemoryImage {
    /// Nothing but zeros.
    pub fn empty(regions: Vec<Region>) -> Self {
        let (regions, unbacked) = (regions.into(), Arc::default());
        Self { regions, layers: Vec::new(), base_layers: 0, unbacked, sibling: None }
    }

    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    /// All bytes, touched or not.
    pub fn size(&self) -> u64 {
        self.regions.iter().map(|region| region.len).sum()
    }

    /// The same with a layer on top.
    #[must_use]
    pub fn with(&self, layer: Layer) -> Self {
        let unbacked =
            self.unbacked.get().map(|unbacked| unbacked.without(&layer.runs.blocks(HUGE_PAGE)));
        let mut layers = self.layers.clone();
        layers.push(Arc::new(layer));
        Self {
            regions: self.regions.clone(),
            layers,
            base_layers: self.base_layers,
            unbacked: Arc::new(unbacked.map_or_else(OnceLock::new, OnceLock::from)),
            sibling: None,
        }
    }

    /// The same with a layer on top that has everything.
    #[must_use]
    pub fn with_file(&self, file: Arc<File>) -> Self {
        self.with(Layer { file, runs: PageRanges::all(self.size()) })
    }

    /// The same, knowing what a machine that lay over it had changed. That machine must be paused.
    pub fn with_sibling(
        &self,
        guest: &GuestMemory,
        changed: &PageRanges,
    ) -> Result<Self, MemoryError> {
        let file = kept(self.size(), |file| {
            changed.iter().try_for_each(|run| pages::write_run(guest, run, file))
        });
        Ok(self.clone().with_sibling_file(Some(file?.into())))
    }

    #[must_use]
    pub fn with_sibling_file(self, sibling: Option<Arc<File>>) -> Self {
        Self { sibling, ..self }
    }

    pub fn sibling(&self) -> Option<&Arc<File>> {
        self.sibling.as_ref()
    }

    /// Long stretches for which no layer has anything; none where that cannot be known.
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
        Ok(PageRanges::all(self.size()).without(&PageRanges::merged(used)))
    }

    /// The same, where the `layers` lowest ones are a snapshot's.
    #[must_use]
    pub fn on_base(self, layers: usize) -> Self {
        Self { base_layers: layers.min(self.layers.len()), ..self }
    }

    pub fn base_layers(&self) -> usize {
        self.base_layers
    }

    /// Whether both are made of the very same layers.
    pub fn is(&self, other: &Self) -> bool {
        let same = |(one, other): (&Arc<Layer>, &Arc<Layer>)| Arc::ptr_eq(one, other);
        self.layers.len() == other.layers.len() && self.layers.iter().zip(&other.layers).all(same)
    }

    /// Makes `guest` lie over this image, as if it had never written anything. The guest must be
    /// paused.
    pub fn put_under(&self, guest: &GuestMemory) -> Result<(), MemoryError> {
        pages::map_zeros(guest, 0..self.size()).map_err(MemoryError::Discard)?;
        self.layers.iter().try_for_each(|layer| layer.cover(guest))
    }

    /// Undoes what `guest`, which lies over this image, has written. What it will write
    /// `rollback_set` gets its old bytes where it is, which saves the guest a fault on each page;
    /// the rest is dropped. The guest must be paused.
    pub fn take_back(
        &self,
        guest: &GuestMemory,
        rollback_set: &mut RollbackWorkingSet,
    ) -> io::Result<()> {
        let private = pages::runs(guest, Pages::Private)?;
        let mut kept = rollback_set.keep(&private);
        pages::discard(guest, &private.without(&kept).at_most(MAX_RUNS))?;
        for layer in self.layers.iter().rev() {
            for run in kept.within(&layer.runs).iter() {
                pages::read_run(guest, run, &layer.file)?;
            }
            kept = kept.without(&layer.runs);
        }
        kept.iter().for_each(|run| pages::zero_run(guest, run));
        Ok(())
    }

    /// A private view for one guest.
    pub fn map(&self) -> Result<GuestMemory, MemoryError> {
        let mut regions = Vec::with_capacity(self.regions.len());
        for region in self.regions.iter() {
            let failed = |source| MemoryError::Map { mib: region.len >> 20, source };
            // Anonymous first, whatever lies over it: the kernel aligns that to huge pages.
            let mapping = map_anonymous(region.len as usize).map_err(failed)?;
            let mapped = GuestRegionMmap::new(mapping, GuestAddress(region.address));
            regions.push(mapped.ok_or(MemoryError::Regions)?);
        }
        let guest = GuestMemory::from_regions(regions).map_err(|_| MemoryError::Regions)?;
        self.layers.iter().try_for_each(|layer| layer.cover(&guest))?;
        Ok(guest)
    }

    /// The image as `guest` sees it now, and the layer by which it differs from this one. The guest
    /// must be paused.
    pub fn frozen(&self, guest: &GuestMemory, runs: &PageRanges) -> Result<Self, MemoryError> {
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
        Ok(self.with(Layer { file: file.into(), runs }))
    }

    /// Begins to make the image as `guest` sees it now. The guest must be paused for this call, and
    /// may go on afterwards. `None` where only [`Self::frozen`] can do it.
    pub fn begin_freeze(
        &self,
        guest: &GuestMemory,
        written: &PageRanges,
    ) -> io::Result<Option<Freezing>> {
        if self.layers.len() >= MAX_LAYERS {
            return Ok(None);
        }
        let runs = written.joined(GAP).at_most(MAX_RUNS);
        let file = sys::memfd(c"pvmm-memory", self.size())?;
        match BackgroundCopy::start(guest, &runs, &file) {
            Ok(background_copy) => {
                let (written, below) = (written.clone(), self.clone());
                Ok(Some(Freezing {
                    written,
                    below,
                    layer: Layer { file: file.into(), runs },
                    background_copy,
                }))
            }
            // A jail may forbid new processes, and there may be no room for one.
            Err(_) => Ok(None),
        }
    }

    /// One layer with everything, when there are too many to put another on top.
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

    /// Puts the top layer over what `guest` has there; it must be what `guest` has there already.
    pub fn cover_top(&self, guest: &GuestMemory) -> Result<(), MemoryError> {
        self.layers.last().map_or(Ok(()), |layer| layer.cover(guest))
    }

    /// The same in one sealed file of this host's memory.
    pub fn held(&self) -> Result<Self, MemoryError> {
        let size = self.size();
        let file = kept(size, |file| self.write_to(file))?;
        // Only a help, and a large one is none: a trim would not look at it.
        let is_small = |sibling: &&Arc<File>| {
            let data = sparse::data(sibling, 0..size).map(PageRanges::merged);
            data.is_ok_and(|data| data.bytes() <= TRIM_MAX)
        };
        let hold = |sibling| kept(size, |file| sparse::copy(sibling, file, 0..size)).ok();
        let sibling = self.sibling.as_ref().filter(is_small).and_then(|file| hold(file));
        let held = Self::empty(self.regions.to_vec()).with_file(file.into());
        let held = held.with_sibling_file(sibling.map(Arc::new));
        // It still is what the snapshot holds, if it was nothing else before.
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

    /// Fills `bytes` with what the layers from the `first` on have from `at` on, zeros where they
    /// have nothing. Returns how much was not a hole.
    pub fn read(&self, first: usize, at: u64, bytes: &mut [u8]) -> io::Result<u64> {
        let range = at..at + bytes.len() as u64;
        let place = |part: &Range<u64>| (part.start - at) as usize..(part.end - at) as usize;
        let mut data = Vec::new();
        let mut left = PageRanges::one(range.clone());
        for layer in self.layers.iter().skip(first).rev() {
            let own = layer.runs.between(&range);
            for run in left.within(&own).iter() {
                for part in sparse::data(&layer.file, run)? {
                    let bytes = bytes.get_mut(place(&part)).unwrap_or_default();
                    layer.file.read_exact_at(bytes, part.start)?;
                    data.push(part);
                }
            }
            left = left.without(&own);
        }
        let data = PageRanges::merged(data);
        for hole in PageRanges::one(range).without(&data).iter() {
            bytes.get_mut(place(&hole)).unwrap_or_default().fill(0);
        }
        Ok(data.bytes())
    }

    /// Which pages of `runs` are in `guest` what they are here. The guest must be paused.
    pub fn unchanged(&self, guest: &GuestMemory, runs: &PageRanges) -> io::Result<PageRanges> {
        let mut same = PageRanges::default();
        let (mut own, mut theirs) = (Vec::new(), Vec::new());
        for run in runs.iter() {
            for (address, part) in pages::guest_parts(guest, run) {
                let len = (part.end - part.start) as usize;
                own.resize(len, 0);
                theirs.resize(len, 0);
                self.read(0, part.start, &mut own)?;
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

    /// The ranges for which the layers from the `first` on speak.
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

/// An image that is being made while its guest runs on.
pub struct Freezing {
    /// What the guest had changed.
    pub written: PageRanges,
    below: MemoryImage,
    layer: Layer,
    background_copy: BackgroundCopy,
}

impl Freezing {
    /// The image, once all of it is there.
    pub fn finish(self) -> Result<MemoryImage, MemoryError> {
        let finish = || -> io::Result<()> {
            self.background_copy.finish()?;
            sys::seal(&self.layer.file)
        };
        finish().map_err(MemoryError::Keep)?;
        Ok(self.below.with(self.layer))
    }
}

/// A sealed file of this host's memory.
fn kept(size: u64, fill: impl FnOnce(&File) -> io::Result<()>) -> Result<File, MemoryError> {
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
    /// How much there is to copy.
    pub fn data_bytes(&self) -> u64 {
        self.runs.bytes()
    }

    /// Puts the layer's ranges over what `guest` has there. The guest must be paused or not begun.
    pub fn cover(&self, guest: &GuestMemory) -> Result<(), MemoryError> {
        for run in self.runs.iter() {
            let mib = (run.end - run.start) >> 20;
            pages::map_file(guest, run, &self.file)
                .map_err(|source| MemoryError::Map { mib, source })?;
        }
        Ok(())
    }
}
