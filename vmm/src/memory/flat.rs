//! Guest memory as one flat file: every byte at its place, and holes where nothing but zeros is.
//!
//! A flat file is what other programs know how to copy, serve and map. All of memory goes into an
//! empty file; what changed since the last save can also go over an older one.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;

use pvmm_devices::sparse;

use super::sys::PageState;
use super::uffd::Userfault;
use super::{Memory, MemoryError, PAGE, PageRanges, pages};

/// The save, or load, that changes are counted from.
#[derive(Default)]
pub struct SaveBaseline {
    /// The number of layers that the image had then. `None` if that is no longer known: then every
    /// page counts as changed.
    layers: Option<usize>,
    /// Keeps the kernel tracking writes to private pages.
    written: Option<Userfault>,
    /// There was a save, and a diff may follow it.
    saved: bool,
}

impl SaveBaseline {
    /// The load of an image with so many layers.
    pub fn since(layers: usize) -> Self {
        Self { layers: Some(layers), written: None, saved: false }
    }
}

impl Memory {
    /// Returns the ranges that may have anything but zeros. With `all_here` false, pages may still
    /// have to come from a page server, so that is all of memory.
    pub fn nonzero_ranges(&self, all_here: bool) -> Result<PageRanges, MemoryError> {
        if !all_here {
            return Ok(PageRanges::all(self.image.size()));
        }
        let mut parts: Vec<Range<u64>> = self.dirty_pages()?.iter().collect();
        for layer in self.image.layers() {
            match layer.data(self.image.size()) {
                Ok(data) => {
                    parts.extend(data.intersection(&layer.runs).iter().map(whole_pages));
                }
                // A block device has no holes to tell of.
                Err(_) => parts.extend(layer.runs.iter()),
            }
        }
        Ok(PageRanges::merged(parts))
    }

    /// Returns whether a diff may follow an earlier save.
    pub(super) fn was_saved(&self) -> bool {
        self.baseline.saved
    }

    /// Returns the pages that changed since the last save, or since the load if there was none;
    /// perhaps a few more.
    pub fn dirty_since_save(&self) -> Result<PageRanges, MemoryError> {
        let Some(layers) = self.baseline.layers else {
            return Ok(PageRanges::all(self.image.size()));
        };
        let private = match self.baseline.written {
            Some(_) => self.scan(PageState::PrivateWritten)?,
            None => self.dirty_pages()?,
        };
        let above = self.image.runs_from(layers).into_iter().map(|(start, end)| start..end);
        Ok(PageRanges::merged(above.chain(private.iter()).collect()))
    }

    /// Makes this instant the baseline, where the kernel can track writes. The guest must be
    /// paused.
    pub fn mark_saved(&mut self) {
        self.baseline.saved = true;
        if self.baseline.written.is_none() {
            self.baseline.written = Userfault::for_written(&self.guest).ok();
        }
        let marked = self.baseline.written.is_some()
            && pages::reset_write_tracking(&self.guest, self.pagemap.as_deref()).is_ok();
        if marked {
            self.baseline.layers = Some(self.image.layers().len());
        } else {
            // The old baseline stays: a diff has more pages than needed, and is right.
            self.baseline.written = None;
        }
    }

    /// Writes all of memory, which is zero except in `filled`, into the empty `file`. The guest
    /// must be paused.
    pub fn write_flat(&self, file: &File, filled: &PageRanges) -> Result<(), MemoryError> {
        let size = self.image.size();
        if self.reflink_to(file) {
            let changed = self.dirty_pages()?;
            file.set_len(size).map_err(MemoryError::Write)?;
            return self.write_over(file, &changed);
        }
        let write = || -> io::Result<()> {
            file.set_len(size)?;
            filled.iter().try_for_each(|run| pages::write_run(&self.guest, run, file))
        };
        write().map_err(MemoryError::Write)
    }

    /// Makes `file` share the blocks of the image. Returns false if the image is not one file, or
    /// its file system cannot share blocks.
    fn reflink_to(&self, file: &File) -> bool {
        let [layer] = self.image.layers() else { return false };
        let whole = layer.runs == PageRanges::all(self.image.size());
        whole && sparse::clone(&layer.file, file).is_ok()
    }

    /// Writes `runs` of memory over what `file` has there, zeros too. The guest must be paused.
    pub fn write_over(&self, file: &File, runs: &PageRanges) -> Result<(), MemoryError> {
        runs.iter()
            .try_for_each(|run| pages::write_all(&self.guest, run, file))
            .map_err(MemoryError::Write)
    }

    /// The sums of all of memory, by `sum`, which gets a piece of at most `piece` bytes at a time.
    /// Memory is zero but in `filled`; what lies in pieces without anything `changed` still has its
    /// sum in `known`, if that is there. The guest must be paused.
    pub fn sums(
        &self,
        piece: u64,
        sum: impl Fn(&[u8]) -> u32,
        known: Option<&[u32]>,
        changed: &PageRanges,
        filled: &PageRanges,
    ) -> Result<Vec<u32>, MemoryError> {
        let size = self.image.size();
        let pieces = |runs: &PageRanges| -> HashSet<u64> {
            let whole = |run: Range<u64>| run.start / piece..run.end.div_ceil(piece);
            runs.iter().flat_map(whole).collect()
        };
        let (changed, filled) = (pieces(changed), pieces(filled));
        let zeros = vec![0; piece as usize];
        let zero_sum = sum(&zeros);
        let mut buffer = zeros;
        let mut sums = Vec::with_capacity(size.div_ceil(piece) as usize);
        for index in 0..size.div_ceil(piece) {
            let (start, end) = (index * piece, ((index + 1) * piece).min(size));
            let known = known.and_then(|known| known.get(index as usize));
            sums.push(match known {
                Some(known) if !changed.contains(&index) => *known,
                _ if !filled.contains(&index) && end - start == piece => zero_sum,
                _ => {
                    let bytes = buffer.get_mut(..(end - start) as usize).unwrap_or_default();
                    pages::read(&self.guest, start, bytes).map_err(MemoryError::Keep)?;
                    sum(bytes)
                }
            });
        }
        Ok(sums)
    }
}

fn whole_pages(range: Range<u64>) -> Range<u64> {
    range.start / PAGE * PAGE..range.end.next_multiple_of(PAGE)
}
