//! Guest memory: a private mapping over an image that never changes.
//!
//! A booted guest's image is empty, a restored guest's is the memory of a snapshot. Pages that the
//! guest writes become private to its mapping, and the kernel can list them: there is no dirty log,
//! a freeze copies the private pages into a new layer of the image, a fork maps the image again, a
//! rollback drops the private pages. Where the image has nothing, the mapping is anonymous and
//! takes huge pages, so that a guest grows by 2 MiB at a fault.
//!
//! | file | subject |
//! | --- | --- |
//! | `image.rs` | the layers below the guests' memory, and how they are mapped |
//! | `pages.rs` | the private pages of a guest, and operations on ranges of pages |
//! | `flat.rs` | guest memory as one file, and the pages that changed since the last one |
//! | `working_set.rs` | the pages of a first use: recorded or guessed, and prefaulted |
//! | `learner.rs` | the working set that the forks of a running VM learn from the first fork |
//! | `rollback_set.rs` | the working set of a VM that was rolled back |
//! | `dedup.rs` | pages that VMs of one template share after they were trimmed |
//! | `background_copy.rs` | copying pages while the guest runs |
//! | `page_server.rs` | pages that another process supplies |
//! | `uffd.rs`, `sys.rs` | system calls |

mod background_copy;
mod dedup;
mod flat;
mod image;
mod learner;
mod page_server;
mod pages;
mod rollback_set;
mod sys;
mod uffd;
mod working_set;

pub use image::{Freezing, Layer, MAX_RUNS, MemoryError, MemoryImage, REWRITTEN_MAX, Region};
pub use learner::{FirstFork, WorkingSetLearner};
pub use page_server::PageServer;
pub use pages::PageRanges;
pub(crate) use sys::memfd;
pub use working_set::WorkingSet;

use crate::ablation::Mechanism;
use dedup::DedupedPages;
use flat::Changes;
use image::HUGE_PAGE;
use pvmm_devices::GuestMemory;
use rollback_set::RollbackWorkingSet;
use sys::Pages;
use uffd::Userfault;

/// The unit in which memory is mapped, copied and compared.
pub const PAGE: u64 = 4096;

/// How a guest's mapping gets its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The image and the host's memory supply them. New memory comes in huge pages.
    Private,
    /// As [`Self::Private`], but huge pages are not asked for: each page that the guest touches
    /// counts by itself.
    Tracked,
    /// A page server supplies them.
    Remote,
}

/// A guest's memory and the image below it.
pub struct Memory {
    pub guest: GuestMemory,
    pub image: MemoryImage,
    mode: Mode,
    changes: Changes,
    /// Learned from the lives that began at `image`.
    rollback_set: RollbackWorkingSet,
    deduped: DedupedPages,
}

impl Memory {
    /// Maps `image` for one guest. Pages that the guest writes are its own.
    pub fn map(image: MemoryImage, mode: Mode) -> Result<Self, MemoryError> {
        let guest = image.map()?;
        let changes = Changes::since(image.layers().len());
        let (rollback_set, deduped) = (RollbackWorkingSet::default(), DedupedPages::default());
        let memory = Self { guest, image, mode, changes, rollback_set, deduped };
        memory.keep_private();
        Ok(memory)
    }

    /// Makes huge pages of the memory for which the image has nothing, except near the pages in
    /// `small`, which will be touched one by one. To be called before anything is written.
    pub fn prepare_growth(&self, small: &PageRanges) -> Result<(), MemoryError> {
        if self.mode != Mode::Private || !Mechanism::Growth.in_use() {
            return Ok(());
        }
        for hole in self.image.unbacked().without(&small.blocks(HUGE_PAGE)).iter() {
            let mib = (hole.end - hole.start) >> 20;
            let failed = |source| MemoryError::Map { mib, source };
            pages::map_zeros(&self.guest, hole.clone()).map_err(failed)?;
            // Only a help: without huge pages the host supplies small ones.
            let _ = pages::advise(&self.guest, hole, libc::MADV_HUGEPAGE);
        }
        self.keep_private();
        Ok(())
    }

    /// Asks the kernel for large pages. Only a help: where it has none, small ones do.
    pub fn prefer_huge_pages(&self) {
        for run in PageRanges::all(self.image.size()).iter() {
            let _ = pages::advise(&self.guest, run, libc::MADV_HUGEPAGE);
        }
    }

    /// Keeps guest memory out of core dumps, and out of processes that are forked here: they have
    /// no business with a guest, and copying its page tables takes time. To be called whenever
    /// something else was mapped.
    fn keep_private(&self) {
        for run in PageRanges::all(self.image.size()).iter() {
            for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
                // Refused for no memory of this kind.
                let _ = pages::advise(&self.guest, run.clone(), advice);
            }
        }
    }

    /// Returns the pages that this guest has changed since its image, as ranges of the image.
    pub fn private_runs(&self) -> Result<PageRanges, MemoryError> {
        let private = pages::runs(&self.guest, Pages::Private).map_err(MemoryError::Scan)?;
        Ok(private.with(self.deduped.runs()))
    }

    /// Moves the changed pages into a sealed layer of the image and maps that in their place. The
    /// guest must be paused. Returns which pages they were.
    pub fn freeze(&mut self) -> Result<PageRanges, MemoryError> {
        let runs = self.private_runs()?;
        let image = self.image.frozen(&self.guest, &runs)?;
        image.cover_top(&self.guest)?;
        if image.layers().len() <= self.image.layers().len() {
            // All layers became one, and the last save's are no longer among them.
            self.changes = Changes::default();
        }
        self.image = image;
        self.rollback_set = RollbackWorkingSet::default();
        self.deduped = DedupedPages::default();
        self.keep_private();
        Ok(runs)
    }

    /// Begins to copy the changed pages into a layer over the image, while the guest goes on over
    /// its old one. Returns `None` if there is little to copy, or no way to do it: then
    /// [`Self::freeze`] is the way. The guest must be paused during this call.
    pub fn begin_freeze(&mut self) -> Result<Option<Freezing>, MemoryError> {
        let private = self.private_runs()?;
        if private.bytes() < BACKGROUND_COPY_MIN {
            return Ok(None);
        }
        self.image.begin_freeze(&self.guest, &private).map_err(MemoryError::Keep)
    }

    /// Gives back pages that hold again what lies under them: those that were made ready and not
    /// written, and those that went from something to nothing; then those that a sibling has too.
    /// Says how many bytes that were. The guest must be paused.
    pub fn trim(&mut self) -> Result<u64, MemoryError> {
        if self.was_saved() {
            // A page that is given back would not count as changed since the last save.
            return Ok(0);
        }
        let private = pages::runs(&self.guest, Pages::Private).map_err(MemoryError::Scan)?;
        let (short, _) = private.shortest(TRIM_MAX);
        // A deduplicated page lies over the sibling, not over the image.
        let over_image = short.without(self.deduped.runs());
        let same = self.image.unchanged(&self.guest, &over_image).map_err(MemoryError::Scan)?;
        pages::discard(&self.guest, &same).map_err(MemoryError::Discard)?;
        let left = short.without(&same);
        let deduped = self.deduped.share(&self.guest, &left, &self.image)?;
        self.keep_private();
        Ok(same.bytes() + deduped)
    }

    /// The image, knowing what this guest has changed, for others to share, as far as a trim looks
    /// at it. The guest must be paused.
    pub fn keep_sibling(&self, image: &MemoryImage) -> Result<MemoryImage, MemoryError> {
        let (short, _) = self.private_runs()?.shortest(TRIM_MAX);
        image.with_sibling(&self.guest, &short)
    }

    /// Makes every page that is read from now on count by itself, not with its neighbours, for as
    /// long as the result is kept. `None` where the kernel cannot.
    pub fn report_each_page(&self) -> Option<Userfault> {
        Userfault::without_fault_around(&self.guest).ok()
    }

    /// What this guest has touched since it was mapped.
    pub fn touched(&self) -> Result<WorkingSet, MemoryError> {
        let read = pages::runs(&self.guest, Pages::Shared).map_err(MemoryError::Scan)?;
        Ok(WorkingSet::new(&self.private_runs()?, &read))
    }

    /// Returns what this guest has touched since it was mapped, for other guests to prefault. Long
    /// ranges that it has written count as read: they are data, and a copy of each page costs
    /// memory. The guest may run.
    pub fn learned(&self) -> Result<WorkingSet, MemoryError> {
        let (written, data) = self.private_runs()?.shortest(REWRITTEN_MAX);
        let read = pages::runs(&self.guest, Pages::Shared).map_err(MemoryError::Scan)?;
        Ok(WorkingSet::new(&written, &read.with(&data)))
    }

    /// Makes the memory what `image` is, whatever was written or frozen since. The guest must be
    /// paused.
    pub fn rewind(&mut self, image: &MemoryImage) -> Result<(), MemoryError> {
        if image.is(&self.image) && self.deduped.runs().count() == 0 {
            image.take_back(&self.guest, &mut self.rollback_set).map_err(MemoryError::Discard)?
        } else {
            image.put_under(&self.guest)?;
            self.image = image.clone();
            self.prepare_growth(&PageRanges::default())?;
            self.deduped = DedupedPages::default();
            self.rollback_set = RollbackWorkingSet::default();
        }
        // What was saved since is not what lies below any more.
        self.changes = Changes::default();
        self.keep_private();
        Ok(())
    }

    /// Finds out what a guest that was taken back writes first. To be called when it goes on.
    pub fn learn(&mut self) {
        self.rollback_set.learn(&self.guest);
    }
}

/// Fewer changed bytes than this are moved while the guest is paused: forking costs as much, and
/// what was moved is shared and need not be copied again.
const BACKGROUND_COPY_MIN: u64 = 4 << 20;

/// The most that is compared while a guest stands still for it. Long runs are somebody's data and
/// seldom go back.
const TRIM_MAX: u64 = 8 << 20;

#[cfg(test)]
mod tests;
