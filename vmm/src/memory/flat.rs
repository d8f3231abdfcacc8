//! Guest memory as one flat file: every byte at its place, and holes where nothing but zeros is.
//!
//! A flat file is what other programs know how to copy, serve and map. All of memory goes into an
//! empty file; what changed since the last save can also go over an older one.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;

use pvmm_devices::sparse;

use super::sys::Pages;
use super::uffd::Userfault;
use super::{Memory, MemoryError, PAGE, PageRanges, pages};

/// Since when pages count as changed.
#[derive(Default)]
pub struct Changes {
    /// How many layers of the image the last save, or the load, had. None if that is not known any
    /// more: then everything counts as changed.
    layers: Option<usize>,
    /// Keeps the kernel's notes of which private pages were written since the last save.
    written: Option<Userfault>,
    /// There was a save, and another may follow that holds only what changed.
    saved: bool,
}

impl Changes {
    /// As of an image with so many layers.
    pub fn since(layers: usize) -> Self {
        Self { layers: Some(layers), written: None, saved: false }
    }
}

impl Memory {
    /// The ranges that may hold anything but zeros. With `all_here` false, pages may still have to
    /// come from elsewhere, so all of them may.
    pub fn filled(&self, all_here: bool) -> Result<PageRanges, MemoryError> {
        if !all_here {
            return Ok(PageRanges::all(self.image.size()));
        }
        let mut parts: Vec<Range<u64>> = self.private_runs()?.iter().collect();
        for layer in self.image.layers() {
            for run in layer.runs.iter() {
                match sparse::data(&layer.file, run.clone()) {
                    Ok(data) => parts.extend(data.into_iter().map(whole_pages)),
                    // A block device has no holes to tell of.
                    Err(_) => parts.push(run),
                }
            }
        }
        Ok(PageRanges::merged(parts))
    }

    /// Whether a later save may hold only what changed since an earlier one.
    pub(super) fn was_saved(&self) -> bool {
        self.changes.saved
    }

    /// The pages that differ from the last save, or from the image if there was none; perhaps a few
    /// more.
    pub fn changed(&self) -> Result<PageRanges, MemoryError> {
        let Some(layers) = self.changes.layers else {
            return Ok(PageRanges::all(self.image.size()));
        };
        let private = match self.changes.written {
            Some(_) => {
                pages::runs(&self.guest, Pages::PrivateWritten).map_err(MemoryError::Scan)?
            }
            None => self.private_runs()?,
        };
        let above = self.image.runs_from(layers).into_iter().map(|(start, end)| start..end);
        Ok(PageRanges::merged(above.chain(private.iter()).collect()))
    }

    /// From now on only what is written later counts as changed, where the kernel can tell. The
    /// guest must be paused.
    pub fn mark_saved(&mut self) {
        self.changes.saved = true;
        if self.changes.written.is_none() {
            self.changes.written = Userfault::for_written(&self.guest).ok();
        }
        let marked = self.changes.written.is_some() && pages::forget_written(&self.guest).is_ok();
        if marked {
            self.changes.layers = Some(self.image.layers().len());
        } else {
            // What counted as changed before goes on to: more than needed, and right.
            self.changes.written = None;
        }
    }

    /// Writes all of memory, which is zero but in `filled`, into `file`, which is empty. The guest
    /// must be paused.
    pub fn write_flat(&self, file: &File, filled: &PageRanges) -> Result<(), MemoryError> {
        let size = self.image.size();
        if self.share_with(file) {
            let changed = self.private_runs()?;
            file.set_len(size).map_err(MemoryError::Write)?;
            return self.write_over(file, &changed);
        }
        let write = || -> io::Result<()> {
            file.set_len(size)?;
            filled.iter().try_for_each(|run| pages::write_run(&self.guest, run, file))
        };
        write().map_err(MemoryError::Write)
    }

    /// Lets `file` have the blocks of the image, where it is one file and its file system can share
    /// them.
    fn share_with(&self, file: &File) -> bool {
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
