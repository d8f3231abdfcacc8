//! Page dedup: a trimmed VM maps pages of a recorded VM wherever its own dirty pages are equal.
//!
//! A first use changes memory in much the same way in every VM of a template: half of the dirty
//! pages of one VM equal those of the others. So the dirty pages of one VM are recorded with the
//! template, and trimmed VMs share them. A page is compared before it is shared, so the contents of
//! the recorded file need not be trusted.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pvmm_devices::GuestMemory;

use super::{MemoryError, MemoryImage, PageRanges, pages};
use crate::ablation::Mechanism;

/// The most ranges that the VMs of this process share: each may be two mappings more, and a process
/// may have 65,530.
const RANGES_MAX: usize = 8 << 10;
static RANGES: AtomicUsize = AtomicUsize::new(0);

/// The ranges of a guest that are not mapped over its image: they lie over a dedup source, over a
/// copy that is being adopted, or over older layers. The guest may have written there since.
#[derive(Default)]
pub struct OffImageRanges {
    ranges: PageRanges,
    counted: usize,
}

impl OffImageRanges {
    /// Returns ranges whose pages lie over layers below the top one, and are not shared.
    pub fn over_older_layers(ranges: PageRanges) -> Self {
        Self { ranges, counted: 0 }
    }

    pub fn ranges(&self) -> &PageRanges {
        &self.ranges
    }

    /// Maps the dedup source of `image` in place of those `private` pages of `guest` that equal it,
    /// as far as there are mappings left. Returns the number of bytes shared. The guest must be
    /// paused.
    pub fn share(
        &mut self,
        guest: &GuestMemory,
        private: &PageRanges,
        image: &MemoryImage,
    ) -> Result<u64, MemoryError> {
        match image.dedup_source().filter(|_| Mechanism::Dedup.in_use()) {
            Some(source) => self.share_file(guest, private, image, source),
            None => Ok(0),
        }
    }

    /// Maps `source` in place of those `private` pages of `guest` that equal it, as [`Self::share`]
    /// does.
    pub fn share_file(
        &mut self,
        guest: &GuestMemory,
        private: &PageRanges,
        image: &MemoryImage,
        source: &Arc<File>,
    ) -> Result<u64, MemoryError> {
        let alone = MemoryImage::empty(image.regions().to_vec()).with_file(source.clone());
        let same = alone.unchanged(guest, private).map_err(MemoryError::Scan)?;
        let mut taken = Vec::new();
        for run in same.iter() {
            if RANGES.fetch_add(1, Ordering::Relaxed) >= RANGES_MAX {
                RANGES.fetch_sub(1, Ordering::Relaxed);
                break;
            }
            self.counted += 1;
            // Noted before the call: it may map the part in one region and fail in the next.
            taken.push(run.clone());
            if pages::map_file(guest, run, source).is_err() {
                break;
            }
        }
        let taken = PageRanges::merged(taken);
        self.ranges = self.ranges.union(&taken);
        // Ranges that were shared before and written since are counted already.
        let counted_twice = self.counted.saturating_sub(self.ranges.count());
        RANGES.fetch_sub(counted_twice, Ordering::Relaxed);
        self.counted -= counted_twice;
        Ok(taken.bytes())
    }
}

impl Drop for OffImageRanges {
    fn drop(&mut self) {
        RANGES.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use pvmm_devices::sparse;
    use vm_memory::{Bytes, GuestAddress};

    use super::super::{Memory, Mode, PAGE, PageState, Region, sys};
    use super::*;

    /// The pieces of a process are counted together, so tests that share any run one after the
    /// other.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    const MIB: u64 = 1 << 20;
    const SAME: u64 = 3 * PAGE;
    const OTHER: u64 = 9 * PAGE;

    fn put(memory: &Memory, address: u64, value: u8) {
        memory.guest.write_obj(value, GuestAddress(address)).unwrap();
    }

    fn get(memory: &Memory, address: u64) -> u8 {
        memory.guest.read_obj(GuestAddress(address)).unwrap()
    }

    fn own_pages(memory: &Memory) -> u64 {
        pages::scan(&memory.guest, None, PageState::Private).unwrap().bytes() / PAGE
    }

    /// An image of ones, which knows a machine that has written `pages` with twos.
    fn template(size: u64, pages: impl Iterator<Item = u64> + Clone) -> MemoryImage {
        let mut memory = Memory::map(
            MemoryImage::empty(vec![Region { address: 0, len: size }]),
            Mode::Tracked,
            None,
        )
        .unwrap();
        (0..size).step_by(PAGE as usize).for_each(|at| put(&memory, at, 1));
        memory.freeze().unwrap();
        let sibling = Memory::map(memory.image.clone(), Mode::Tracked, None).unwrap();
        pages.for_each(|at| put(&sibling, at, 2));
        sibling.record_dedup_source(&memory.image).unwrap()
    }

    /// Used as its sibling was, but for one page, and at rest.
    fn used(image: &MemoryImage) -> Memory {
        let mut memory = Memory::map(image.clone(), Mode::Tracked, None).unwrap();
        put(&memory, SAME, 2);
        put(&memory, OTHER, 3);
        assert_eq!(memory.trim().unwrap(), PAGE);
        memory
    }

    #[test]
    fn pages_that_are_the_same_in_a_sibling_are_shared_until_they_are_written() {
        let _alone = alone();
        let image = template(4 * MIB, [SAME, OTHER].into_iter());
        for image in [image.clone(), image.copy_to_memfd().unwrap()] {
            let [one, two] = [(); 2].map(|()| used(&image));
            assert_eq!([own_pages(&one), own_pages(&two)], [1, 1]);
            assert_eq!(one.dirty_pages().unwrap().bytes(), 2 * PAGE, "still a change");
            assert_eq!([SAME, OTHER, 0].map(|at| get(&one, at)), [2, 3, 1]);
            put(&one, SAME, 7);
            assert_eq!([get(&one, SAME), get(&two, SAME)], [7, 2]);
        }
    }

    #[test]
    fn what_is_shared_is_frozen_and_saved_and_taken_back_like_what_is_not() {
        let _alone = alone();
        let image = template(4 * MIB, [SAME].into_iter());
        let mut frozen = used(&image);
        frozen.freeze().unwrap();
        let child = Memory::map(frozen.image.clone(), Mode::Tracked, None).unwrap();
        assert_eq!([SAME, OTHER, 0].map(|at| get(&child, at)), [2, 3, 1]);

        let mut saved = used(&image);
        let changed = saved.dirty_since_save().unwrap();
        assert_eq!(changed, saved.dirty_pages().unwrap());
        saved.mark_saved();
        assert_eq!(saved.dirty_since_save().unwrap().bytes(), 0);
        put(&saved, SAME, 4);
        assert_eq!(saved.dirty_since_save().unwrap(), PageRanges::one(SAME..SAME + PAGE));

        let mut back = used(&image);
        back.rollback(&image).unwrap();
        assert_eq!([SAME, OTHER].map(|at| get(&back, at)), [1, 1]);
        assert_eq!(back.dirty_pages().unwrap(), PageRanges::default());
    }

    #[test]
    fn what_is_shared_is_copied_beside_a_running_guest() {
        let _alone = alone();
        let image = template(16 * MIB, [SAME].into_iter());
        let mut parent = used(&image);
        (8 * MIB..16 * MIB).step_by(PAGE as usize).for_each(|at| put(&parent, at, 5));
        let freezing = parent.begin_freeze(None).unwrap().expect("much was changed");
        put(&parent, SAME, 6);
        let child = Memory::map(freezing.finish().unwrap(), Mode::Tracked, None).unwrap();
        assert_eq!([SAME, OTHER, 8 * MIB].map(|at| get(&child, at)), [2, 3, 5]);
    }

    #[test]
    fn page_that_was_shared_and_is_what_it_was_before_that_is_not_lost() {
        let _alone = alone();
        let image = template(4 * MIB, [SAME].into_iter());
        let mut memory = used(&image);
        put(&memory, SAME, 1);
        memory.trim().unwrap();
        assert_eq!(get(&memory, SAME), 1, "as in the image, which is not what lies under it");
        put(&memory, SAME, 2);
        memory.trim().unwrap();
        assert_eq!((get(&memory, SAME), own_pages(&memory)), (2, 1));
    }

    #[test]
    fn page_that_is_shared_again_counts_once() {
        let _alone = alone();
        let image = template(4 * MIB, [SAME].into_iter());
        let mut memory = used(&image);
        for _ in 0..3 {
            put(&memory, SAME, 7);
            put(&memory, SAME, 2);
            assert_eq!((memory.trim().unwrap(), memory.off_image.counted), (PAGE, 1));
        }
    }

    #[test]
    fn sibling_that_is_large_is_not_held_and_of_a_large_one_the_short_runs_are_kept() {
        let image = template(32 * MIB, (MIB..32 * MIB).step_by(PAGE as usize).chain([SAME]));
        let kept = image.dedup_source().unwrap();
        assert_eq!(sparse::data(kept, 0..32 * MIB).unwrap(), vec![SAME..SAME + PAGE]);
        let large = sys::memfd(c"test", 32 * MIB).unwrap();
        FileExt::write_all_at(&large, &vec![5; 32 << 20], 0).unwrap();
        let held = image.with_dedup_file(Some(large.into())).copy_to_memfd().unwrap();
        assert!(held.dedup_source().is_none());
    }

    #[test]
    fn machines_of_a_process_share_no_more_pieces_than_it_may_have_mappings() {
        let _alone = alone();
        let places = (0..16 * MIB).step_by(2 * PAGE as usize);
        let image = template(16 * MIB, places.clone());
        let share = || {
            let mut memory = Memory::map(image.clone(), Mode::Tracked, None).unwrap();
            places.clone().for_each(|at| put(&memory, at, 2));
            memory.trim().unwrap();
            assert!(places.clone().all(|at| get(&memory, at) == 2));
            memory
        };
        let all = 8 * MIB / PAGE;
        let machines: Vec<_> = (0..=RANGES_MAX as u64 / all).map(|_| share()).collect();
        assert!(own_pages(machines.last().unwrap()) > 0);
        drop(machines);
        assert_eq!(own_pages(&share()), 0);
    }
}
