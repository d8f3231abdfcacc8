//! Memory that a machine uses for the first time lies in a file of its own, so that a freeze takes
//! the file and copies nothing.
//!
//! A machine that came from a template finds long stretches of zeros there: what its kernel had not
//! handed out yet. A file is mapped over those, shared, so that what the guest writes is in it. A
//! freeze makes the file a layer of the image and the guest's view of it a private one; what is
//! still unused gets a new file.

use std::fs::File;
use std::io;
use std::sync::Arc;

use pvmm_devices::{GuestMemory, sparse};

use super::sys::{self, DeferredUnmap, View};
use super::{Layer, PageRanges, pages};

/// The file behind the memory that a machine had not used when it was made.
pub struct ForkableMemory {
    file: Arc<File>,
    /// Where it is mapped; it has nothing elsewhere.
    stretches: PageRanges,
}

impl ForkableMemory {
    /// Puts a file under `stretches` of `guest`, where there is nothing but zeros that nobody has
    /// touched. As far as the host allows it: elsewhere the guest's pages are private.
    pub fn begin(guest: &GuestMemory, stretches: &PageRanges, size: u64) -> Option<Self> {
        let file = Arc::new(sys::memfd(c"pvmm-fresh", size).ok()?);
        let mut forkable = Self { file, stretches: PageRanges::default() };
        for (_, part) in stretches.iter().flat_map(|stretch| pages::host_parts(guest, stretch)) {
            if pages::map_file(guest, part.clone(), &forkable.file, View::Shared).is_err() {
                break;
            }
            forkable.stretches.push(part);
        }
        (forkable.stretches.count() > 0).then_some(forkable)
    }

    /// The pages that were used.
    pub fn used(&self) -> io::Result<PageRanges> {
        let mut used = Vec::new();
        for stretch in self.stretches.iter() {
            used.extend(sparse::data(&self.file, stretch)?);
        }
        Ok(PageRanges::merged(used))
    }

    /// Makes the guest's view of the file private, so that the file stays as it is, and returns
    /// what was `used` of it as a layer. Where that fails, the rest is as before. The guest must be
    /// paused, and unmapping what was set `deferred_unmaps` can wait.
    pub fn part(
        &mut self,
        guest: &GuestMemory,
        used: &PageRanges,
        deferred_unmaps: &mut Vec<DeferredUnmap>,
    ) -> (Layer, io::Result<()>) {
        let mut parted = PageRanges::default();
        let parts = self.stretches.iter().flat_map(|stretch| pages::host_parts(guest, stretch));
        let done = parts.map(|(_, part)| part).try_for_each(|part| {
            // Only a help: without it, the next line unmaps page by page.
            deferred_unmaps.extend(pages::defer_unmap(guest, part.clone()).unwrap_or_default());
            pages::map_file(guest, part.clone(), &self.file, View::Private)?;
            parted.push(part);
            Ok(())
        });
        self.stretches = self.stretches.without(&parted);
        (Layer { file: self.file.clone(), runs: used.within(&parted) }, done)
    }

    /// Gives back what is in `runs`, as far as it is here: it reads as zeros again. Returns what is
    /// not here.
    pub fn give_back(&self, runs: &PageRanges) -> io::Result<PageRanges> {
        runs.within(&self.stretches).iter().try_for_each(|run| sparse::punch(&self.file, run))?;
        Ok(runs.without(&self.stretches))
    }
}
