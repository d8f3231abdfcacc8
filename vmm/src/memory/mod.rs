//! Guest memory: a private mapping over an image that never changes.
//!
//! A booted guest's image is empty, a restored guest's is the memory of a snapshot. Pages that the
//! guest writes become private to its mapping, and the page tables tell which they are: a freeze
//! copies the private pages into a new layer of the image, a fork maps the image again, a rollback
//! drops the private pages. Where the image has nothing, the mapping is anonymous and takes huge
//! pages, so that a guest grows by 2 MiB at a fault.
//!
//! | file | subject |
//! | --- | --- |
//! | `image.rs` | the layers below the guests' memory, and how they are mapped |
//! | `pages.rs` | the private pages of a guest, and operations on ranges of pages |
//! | `flat.rs` | guest memory as one file, and the pages that changed since the last one |
//! | `working_set.rs` | the pages of a first use: recorded or guessed, and prefaulted |
//! | `dedup.rs` | pages that VMs of one template share after they were trimmed |
//! | `background_copy.rs` | copying pages while the guest runs |
//! | `adopt.rs` | sharing such a copy with the guest that it was made of |
//! | `page_server.rs` | pages that another process supplies |
//! | `uffd.rs`, `sys.rs` | system calls |

mod adopt;
mod background_copy;
mod dedup;
mod flat;
mod image;
mod page_server;
mod pages;
mod sys;
mod uffd;
mod working_set;

pub use adopt::Adoption;
pub use image::{Freezing, Layer, MAX_RUNS, MemoryError, MemoryImage, REWRITTEN_MAX, Region};
pub use page_server::PageServer;
pub use pages::{PAGEMAP, PageRanges};
pub(crate) use sys::memfd;
pub use working_set::WorkingSet;

use std::fs::File;
use std::sync::{Arc, Weak};

use crate::ablation::Mechanism;
use crate::thread_filters::SystemCallFilter;
use dedup::OffImageRanges;
use flat::SaveBaseline;
use image::HUGE_PAGE;
use pvmm_devices::GuestMemory;
use sys::PageState;
use uffd::Userfault;

/// The unit in which memory is mapped, copied and compared.
pub const PAGE: u64 = 4096;

/// How a guest's mapping gets its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The image and the host's memory supply them. New memory comes in huge pages.
    Private,
    /// As [`Self::Private`], but in small pages, so that each page that the guest touches counts by
    /// itself.
    Tracked,
    /// A page server supplies them.
    Remote,
}

/// A guest's memory and the image below it.
pub struct Memory {
    pub guest: GuestMemory,
    pub image: MemoryImage,
    baseline: SaveBaseline,
    /// The ranges that are mapped over something else than the image.
    off_image: OffImageRanges,
    /// The file of the last background copy, for an adoption to know it by. None after a rollback.
    last_copy: Weak<File>,
    /// This process's list of pages, if its owner opened it.
    pagemap: Option<Arc<File>>,
}

impl Memory {
    /// Maps `image` for one guest. Pages that the guest writes are its own. Near the pages that
    /// `working_set` says are written, memory stays in small pages: they are prefaulted one by one.
    pub fn map(
        image: MemoryImage,
        mode: Mode,
        working_set: Option<&WorkingSet>,
    ) -> Result<Self, MemoryError> {
        let huge = if mode == Mode::Private && Mechanism::Growth.in_use() {
            let small = working_set.map(|set| set.written.blocks(HUGE_PAGE)).unwrap_or_default();
            image.unbacked().difference(&small)
        } else {
            PageRanges::default()
        };
        let guest = image.map(&huge)?;
        let baseline = SaveBaseline::since(image.layers().len());
        let off_image = OffImageRanges::default();
        let last_copy = Weak::new();
        let memory = Self { guest, image, baseline, off_image, last_copy, pagemap: None };
        if mode == Mode::Tracked {
            memory.use_small_pages();
        }
        memory.exclude_from_forks_and_dumps();
        Ok(memory)
    }

    /// Sets the list of this process's pages, for a process that cannot open it later.
    pub fn set_pagemap(&mut self, pagemap: Option<Arc<File>>) {
        self.pagemap = pagemap;
    }

    fn scan(&self, wanted: PageState) -> Result<PageRanges, MemoryError> {
        pages::scan(&self.guest, self.pagemap.as_deref(), wanted).map_err(MemoryError::Scan)
    }

    /// Asks the kernel for huge pages everywhere. Where it has none, it supplies small ones.
    pub fn advise_huge_pages(&self) {
        for run in PageRanges::all(self.image.size()).iter() {
            let _ = pages::advise(&self.guest, run, libc::MADV_HUGEPAGE);
        }
    }

    /// Makes new memory come in small pages from now on.
    fn use_small_pages(&self) {
        for hole in self.image.unbacked().iter() {
            // The kernel refuses it only where it has no huge pages.
            let _ = pages::advise(&self.guest, hole, libc::MADV_NOHUGEPAGE);
        }
    }

    /// Excludes guest memory from core dumps and from child processes, which have no use for it and
    /// would copy its page tables; that of a background copy asks for it. To be called whenever
    /// something was mapped.
    fn exclude_from_forks_and_dumps(&self) {
        for run in PageRanges::all(self.image.size()).iter() {
            for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
                // The kernel refuses neither for memory of this kind.
                let _ = pages::advise(&self.guest, run.clone(), advice);
            }
        }
    }

    /// Returns the pages that may differ from the image, as ranges of the image: those that are
    /// private, and those that are mapped over something else.
    pub fn dirty_pages(&self) -> Result<PageRanges, MemoryError> {
        let private = self.scan(PageState::Private)?;
        Ok(private.union(self.off_image.ranges()))
    }

    /// Moves the changed pages into a sealed layer of the image and maps that in their place. The
    /// guest must be paused. Returns which pages they were.
    pub fn freeze(&mut self) -> Result<PageRanges, MemoryError> {
        let dirty = self.dirty_pages()?;
        let image = self.image.with_dirty_pages(&self.guest, &dirty)?;
        image.map_top_layer_into(&self.guest)?;
        if image.layers().len() <= self.image.layers().len() {
            // All layers became one, and the last save's are no longer among them.
            self.baseline = SaveBaseline::default();
        }
        self.image = image;
        self.off_image = OffImageRanges::default();
        self.exclude_from_forks_and_dumps();
        Ok(dirty)
    }

    /// Begins to copy the changed pages into a layer over the image, while the guest goes on over
    /// its old one. Returns `None` if there is little to copy, or no way to do it: then
    /// [`Self::freeze`] is the way. The guest must be paused during this call. `filter` is that of
    /// the copying process.
    pub fn begin_freeze(
        &mut self,
        filter: Option<&SystemCallFilter>,
    ) -> Result<Option<Freezing>, MemoryError> {
        let dirty = self.dirty_pages()?;
        if dirty.bytes() < BACKGROUND_COPY_MIN {
            return Ok(None);
        }
        let begun = self.image.begin_freeze(&self.guest, &dirty, filter);
        let begun = begun.map_err(MemoryError::Keep)?;
        self.last_copy = begun.as_ref().map_or_else(Weak::new, Freezing::file);
        Ok(begun)
    }

    /// Drops private pages that equal the image, as prefaulted pages do that were not written, and
    /// deduplicates those that equal the image's dedup source. Returns the number of bytes given
    /// back. The guest must be paused.
    pub fn trim(&mut self) -> Result<u64, MemoryError> {
        if self.was_saved() {
            // A page that is dropped would not count as changed since the last save.
            return Ok(0);
        }
        let private = self.scan(PageState::Private)?;
        let (short, _) = private.shortest(TRIM_MAX);
        // A deduplicated page is mapped over the dedup source, not over the image.
        let over_image = short.difference(self.off_image.ranges());
        let same = self.image.unchanged(&self.guest, &over_image).map_err(MemoryError::Scan)?;
        pages::discard(&self.guest, &same).map_err(MemoryError::Discard)?;
        let left = short.difference(&same);
        let deduped = self.off_image.share(&self.guest, &left, &self.image)?;
        self.exclude_from_forks_and_dumps();
        Ok(same.bytes() + deduped)
    }

    /// Returns `image` with the dirty pages of this guest as its dedup source, as many as a trim
    /// compares. The guest must be paused.
    pub fn record_dedup_source(&self, image: &MemoryImage) -> Result<MemoryImage, MemoryError> {
        let (short, _) = self.dirty_pages()?.shortest(TRIM_MAX);
        image.with_dedup_source(&self.guest, &short)
    }

    /// Makes the kernel map single pages on a read, without their neighbours, until the guard is
    /// dropped. Returns `None` where the kernel cannot.
    pub fn without_fault_around(&self) -> Option<Userfault> {
        Userfault::without_fault_around(&self.guest).ok()
    }

    /// Returns the pages that this guest has touched since it was mapped.
    pub fn touched(&self) -> Result<WorkingSet, MemoryError> {
        let read = self.scan(PageState::FileMapped)?;
        Ok(WorkingSet::new(&self.dirty_pages()?, &read))
    }

    /// Returns the pages that this guest has touched since it was mapped, for later guests to
    /// prefault. Long dirty ranges count as read: they are data, and a copy of each page costs
    /// memory. The guest may run.
    pub fn learned(&self) -> Result<WorkingSet, MemoryError> {
        let (written, data) = self.dirty_pages()?.shortest(REWRITTEN_MAX);
        let read = self.scan(PageState::FileMapped)?;
        Ok(WorkingSet::new(&written, &read.union(&data)))
    }

    /// Takes the memory back to `image`, whatever was written or frozen since. The guest must be
    /// paused.
    pub fn rollback(&mut self, image: &MemoryImage) -> Result<(), MemoryError> {
        if image.has_same_layers(&self.image) && self.off_image.ranges().count() == 0 {
            let private = self.scan(PageState::Private)?;
            image.revert_dirty_pages(&self.guest, &private).map_err(MemoryError::Discard)?
        } else {
            image.remap(&self.guest)?;
            self.off_image = OffImageRanges::default();
        }
        self.image = image.clone();
        self.last_copy = Weak::new();
        // A VM that is rolled back has short lives, and would clear whole huge pages in each for
        // the few pages that it writes.
        self.use_small_pages();
        // The image no longer has what was saved since.
        self.baseline = SaveBaseline::default();
        self.exclude_from_forks_and_dumps();
        Ok(())
    }
}

/// Fewer dirty bytes than this are copied while the guest is paused: starting a background copy
/// costs as much, and the next freeze would copy the pages again.
const BACKGROUND_COPY_MIN: u64 = 4 << 20;

/// The most bytes that a trim compares while the guest is paused. Long ranges are data of a program
/// and seldom equal the image.
const TRIM_MAX: u64 = 8 << 20;

#[cfg(test)]
mod tests;
