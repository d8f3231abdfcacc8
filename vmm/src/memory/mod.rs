//! Guest memory: a private mapping over an image that never changes.
//!
//! A booted guest's image is empty, a restored guest's is a snapshot's memory. What the guest has
//! written since is in private pages, which the kernel can list: so no dirty log is kept, and going
//! back means dropping those pages. Where the image has nothing and the guest may be forked, its
//! pages lie in a file of its own instead, and a fork takes the file.
//!
//! | file | what it answers |
//! | --- | --- |
//! | `image.rs` | what lies under a guest's memory, and how it is mapped |
//! | `pages.rs` | which pages the guest has made its own |
//! | `flat.rs` | how memory becomes one file, and what changed since it did |
//! | `forkable.rs` | how memory is used for the first time, so that a freeze need not copy it |
//! | `dedup.rs` | which pages a machine at rest shares with others that were used as it was |
//! | `rollback_set.rs` | which pages stay in place when a guest is taken back |
//! | `background_copy.rs` | how pages are copied while the guest runs on |
//! | `working_set.rs` | which pages a first use touches, and how they are made ready |
//! | `learner.rs` | what the children of a running machine learn from the first of them |
//! | `page_server.rs` | how another process supplies the pages |
//! | `uffd.rs`, `sys.rs` | the system calls |

mod background_copy;
mod dedup;
mod flat;
mod forkable;
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

use dedup::DedupedPages;
use flat::Changes;
use forkable::ForkableMemory;
use image::{MAX_LAYERS, STRETCH};
use pvmm_devices::GuestMemory;
use rollback_set::RollbackWorkingSet;
use sys::{DeferredUnmap, Pages};
use uffd::Userfault;

/// The unit in which memory is mapped, copied and compared.
pub const PAGE: u64 = 4096;

/// A guest's memory and the image it lies over.
pub struct Memory {
    pub guest: GuestMemory,
    pub image: MemoryImage,
    changes: Changes,
    /// About lives that began at `image`.
    rollback_set: RollbackWorkingSet,
    forkable: Option<ForkableMemory>,
    deduped: DedupedPages,
    /// What is used for the first time goes into a file, whenever that is possible.
    to_fork: bool,
    /// The guest has not run yet.
    unused: bool,
    deferred_unmaps: Vec<DeferredUnmap>,
}

impl Memory {
    /// Maps `image` for one guest: what it writes stays its own.
    pub fn map(image: MemoryImage) -> Result<Self, MemoryError> {
        Self::map_for(image, false)
    }

    /// The same for a guest that may be forked: what it uses for the first time need not be copied
    /// then.
    pub fn map_to_fork(image: MemoryImage) -> Result<Self, MemoryError> {
        Self::map_for(image, true)
    }

    fn map_for(image: MemoryImage, to_fork: bool) -> Result<Self, MemoryError> {
        let changes = Changes::since(image.layers().len());
        let guest = image.map()?;
        let (rollback_set, forkable, deduped) =
            (RollbackWorkingSet::default(), None, DedupedPages::default());
        let deferred_unmaps = Vec::new();
        let unused = true;
        let memory = Self {
            guest,
            image,
            changes,
            rollback_set,
            forkable,
            deduped,
            to_fork,
            unused,
            deferred_unmaps,
        };
        memory.keep_private();
        Ok(memory)
    }

    /// To be called before the guest runs. Only a help: without it a freeze has more to copy.
    pub fn begin_use(&mut self) {
        let first = std::mem::replace(&mut self.unused, false);
        if first
            && self.to_fork
            && let Ok(touched) = pages::runs(&self.guest, Pages::Private)
        {
            self.renew(&touched);
        }
    }

    /// Puts a file under what was not used yet, and is not among the `private` pages. It will be a
    /// layer, so this leaves room for others: too many would have to become one while the guest
    /// stands still.
    fn renew(&mut self, private: &PageRanges) {
        if self.to_fork && self.forkable.is_none() && self.image.layers().len() < MAX_LAYERS / 2 {
            let unbacked = self.image.unbacked().without(&private.blocks(STRETCH));
            self.forkable = ForkableMemory::begin(&self.guest, &unbacked, self.image.size());
        }
        self.keep_private();
    }

    /// What was used for the first time becomes a layer of the image. Returns which pages that
    /// were. The guest must be paused.
    fn keep_forkable(&mut self) -> Result<PageRanges, MemoryError> {
        let used = self.newly_used()?;
        let Some(forkable) = &mut self.forkable else { return Ok(used) };
        let (layer, parted) = forkable.part(&self.guest, &used, &mut self.deferred_unmaps);
        let file = layer.file.clone();
        if layer.runs.count() > 0 {
            self.image = self.image.with(layer);
        }
        parted.map_err(MemoryError::Keep)?;
        self.forkable = None;
        sys::seal(&file).map_err(MemoryError::Keep)?;
        Ok(used)
    }

    /// Does what the last freeze has left for later, so that the next one finds nothing to do. The
    /// guest may run.
    pub fn tidy(&mut self) {
        self.deferred_unmaps.clear();
    }

    /// From now on every page that the guest writes is private, and can be dropped or told apart.
    /// The guest must be paused.
    pub fn go_private(&mut self) -> Result<(), MemoryError> {
        self.to_fork = false;
        self.keep_forkable().map(|_| ())
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

    /// The pages that this guest has changed since its image, as ranges of the image.
    pub fn private_runs(&self) -> Result<PageRanges, MemoryError> {
        Ok(self.own_runs()?.with(&self.newly_used()?))
    }

    /// Those of them that lie over the image.
    fn own_runs(&self) -> Result<PageRanges, MemoryError> {
        let private = pages::runs(&self.guest, Pages::Private).map_err(MemoryError::Scan)?;
        Ok(private.with(self.deduped.runs()))
    }

    /// Those of them that lie in a file of the guest's own.
    fn newly_used(&self) -> Result<PageRanges, MemoryError> {
        let used = self
            .forkable
            .as_ref()
            .map(ForkableMemory::used)
            .transpose()
            .map_err(MemoryError::Scan)?;
        Ok(used.unwrap_or_default())
    }

    /// Moves the changed pages into a sealed layer of the image and lies over that from now on. The
    /// guest must be paused. Returns which pages that were.
    pub fn freeze(&mut self) -> Result<PageRanges, MemoryError> {
        let used = self.keep_forkable()?;
        let runs = self.private_runs()?;
        let image = self.image.frozen(&self.guest, &runs)?;
        image.cover_top(&self.guest)?;
        if image.layers().len() <= self.image.layers().len() {
            // All layers became one, and what the last save had is no more a part of them.
            self.changes = Changes::default();
        }
        self.image = image;
        self.rollback_set = RollbackWorkingSet::default();
        self.deduped = DedupedPages::default();
        self.renew(&PageRanges::default());
        Ok(runs.with(&used))
    }

    /// Begins to copy the changed pages into a layer over the image, while the guest goes on over
    /// its old one. `None` if there is little to copy, or no way to do it: then [`Self::freeze`] is
    /// the way. The guest must be paused for this call.
    pub fn begin_freeze(&mut self) -> Result<Option<Freezing>, MemoryError> {
        let private = self.own_runs()?;
        if private.bytes() < BACKGROUND_COPY_MIN {
            return Ok(None);
        }
        let used = self.keep_forkable()?;
        let begun = self.image.begin_freeze(&self.guest, &private).map_err(MemoryError::Keep)?;
        self.renew(&private);
        Ok(begun.map(|mut freezing| {
            freezing.written = private.with(&used);
            freezing
        }))
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
        let (short, _) = private.with(&self.newly_used()?).shortest(TRIM_MAX);
        // Not the image, but the sibling lies under what is shared.
        let over_image = short.without(self.deduped.runs());
        let same = self.image.unchanged(&self.guest, &over_image).map_err(MemoryError::Scan)?;
        let dropped = match &self.forkable {
            Some(forkable) => forkable.give_back(&same).map_err(MemoryError::Discard)?,
            None => same.clone(),
        };
        pages::discard(&self.guest, &dropped).map_err(MemoryError::Discard)?;
        let left = short.within(&private).without(&same);
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

    /// Makes the memory what `image` is, whatever was written or frozen since. The guest must be
    /// paused.
    pub fn rewind(&mut self, image: &MemoryImage) -> Result<(), MemoryError> {
        // The view of a file that is shared cannot be taken back, only taken away.
        let all_private = self.forkable.is_none() && self.deduped.runs().count() == 0;
        if image.is(&self.image) && all_private {
            image.take_back(&self.guest, &mut self.rollback_set).map_err(MemoryError::Discard)?
        } else {
            image.put_under(&self.guest)?;
            self.forkable = None;
            self.deduped = DedupedPages::default();
            self.rollback_set = RollbackWorkingSet::default();
        }
        self.image = image.clone();
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
