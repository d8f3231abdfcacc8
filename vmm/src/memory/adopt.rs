//! Adoption: a guest whose dirty pages were copied for its forks shares the copy with them.
//!
//! A background copy leaves the guest over its old layers, with private pages that equal the copy.
//! Adoption maps the copy in place of those pages, some at a time, and then takes it as the top
//! layer of the guest's image. The next freeze then copies only what was written since.

use std::sync::Arc;

use super::{Memory, MemoryError, MemoryImage, PageRanges, PageState, dedup};

/// A copy of a guest's memory on its way to become a layer of that guest.
pub struct Adoption {
    image: MemoryImage,
    /// Where to go on comparing.
    next: u64,
}

impl Adoption {
    /// Returns the adoption of an image that was frozen from the guest.
    pub fn of(image: MemoryImage) -> Self {
        Self { image, next: 0 }
    }
}

impl Memory {
    /// Returns whether the copy can still become a layer of this guest: not if it was copied in
    /// the pause, nor if the guest was frozen or rolled back since, or saved, after which a page
    /// that is dropped would not count as changed.
    pub fn can_adopt(&self, adoption: &Adoption) -> bool {
        let top = adoption.image.layers().last();
        let is_last_copy = top.is_some_and(|top| Arc::as_ptr(&top.file) == self.last_copy.as_ptr());
        is_last_copy && adoption.image.is_layer_over(&self.image) && !self.was_saved()
    }

    /// Compares about `max` bytes more, and maps the copy where it is equal. Returns whether there
    /// is more to do. The guest must be paused.
    pub fn adopt(&mut self, adoption: &mut Adoption, max: u64) -> Result<bool, MemoryError> {
        let Some(layer) = adoption.image.layers().last().cloned() else { return Ok(false) };
        if !self.can_adopt(adoption) {
            return Ok(false);
        }
        let private = self.scan(PageState::Private)?.intersection(&layer.runs);
        let left = private.clip(&(adoption.next..self.image.size()));
        let slice = left.first(max);
        if let Some(last) = slice.iter().last() {
            self.off_image.share_file(&self.guest, &slice, &self.image, &layer.file)?;
            self.exclude_from_forks_and_dumps();
            adoption.next = last.end;
            return Ok(true);
        }
        // Pages that are still private lie over older layers, and are noted like deduplicated ones.
        // All others equal the copy, or were given back by the guest.
        self.off_image = dedup::OffImageRanges::over_older_layers(private);
        self.image = adoption.image.clone();
        Ok(false)
    }
}

impl PageRanges {
    /// Returns the first ranges, of `max` bytes in all.
    fn first(&self, max: u64) -> Self {
        let (mut first, mut left) = (Self::default(), max);
        for run in self.iter() {
            let len = (run.end - run.start).min(left);
            if len == 0 {
                break;
            }
            first.push(run.start..run.start + len);
            left -= len;
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::super::{Mode, PAGE, Region};
    use super::*;

    const MIB: u64 = 1 << 20;
    const SIZE: u64 = 32 * MIB;

    fn put(memory: &Memory, address: u64, value: u8) {
        memory.guest.write_obj(value, GuestAddress(address)).unwrap();
    }

    fn get(memory: &Memory, address: u64) -> u8 {
        memory.guest.read_obj(GuestAddress(address)).unwrap()
    }

    fn private_bytes(memory: &Memory) -> u64 {
        memory.scan(PageState::Private).unwrap().bytes()
    }

    /// A guest with 16 MiB of fives, and an image that was frozen from it; it wrote a page since.
    fn forked() -> (Memory, MemoryImage) {
        let image = MemoryImage::empty(vec![Region { address: 0, len: SIZE }]);
        let mut memory = Memory::map(image, Mode::Tracked, None).unwrap();
        (8 * MIB..24 * MIB).step_by(PAGE as usize).for_each(|at| put(&memory, at, 5));
        let freezing = memory.begin_freeze(None).unwrap().expect("much was changed");
        put(&memory, 9 * MIB, 6);
        (memory, freezing.finish().unwrap())
    }

    fn adopt_all(memory: &mut Memory, image: &MemoryImage) -> usize {
        let mut adoption = Adoption::of(image.clone());
        (0..).take_while(|_| memory.adopt(&mut adoption, MIB).unwrap()).count()
    }

    #[test]
    fn guest_that_adopts_the_copy_has_only_what_it_wrote_since() {
        let (mut memory, image) = forked();
        assert_eq!(private_bytes(&memory), 16 * MIB);
        assert!(adopt_all(&mut memory, &image) >= 16);
        assert_eq!(private_bytes(&memory), PAGE);
        assert_eq!([8, 9, 10].map(|at| get(&memory, at * MIB)), [5, 6, 5]);
        assert_eq!(memory.dirty_pages().unwrap(), PageRanges::one(9 * MIB..9 * MIB + PAGE));
        let child = Memory::map(image, Mode::Tracked, None).unwrap();
        put(&memory, 10 * MIB, 7);
        assert_eq!([9, 10].map(|at| get(&child, at * MIB)), [5, 5]);
    }

    #[test]
    fn next_freeze_and_a_rollback_know_what_lies_below() {
        let (mut memory, image) = forked();
        adopt_all(&mut memory, &image);
        put(&memory, 20 * MIB, 8);
        assert_eq!(memory.freeze().unwrap().bytes(), 2 * PAGE, "the rest is in the image");
        let child = Memory::map(memory.image.clone(), Mode::Tracked, None).unwrap();
        assert_eq!([9, 10, 20].map(|at| get(&child, at * MIB)), [6, 5, 8]);

        let (mut memory, image) = forked();
        adopt_all(&mut memory, &image);
        memory.rollback(&image).unwrap();
        assert_eq!([8, 9, 10].map(|at| get(&memory, at * MIB)), [5, 5, 5]);
        assert_eq!(memory.dirty_pages().unwrap().bytes(), 0);
    }

    #[test]
    fn page_that_is_again_as_in_the_copy_is_not_lost_by_a_trim() {
        let (mut memory, image) = forked();
        adopt_all(&mut memory, &image);
        put(&memory, 9 * MIB, 5);
        memory.trim().unwrap();
        assert_eq!(get(&memory, 9 * MIB), 5);
    }

    #[test]
    fn adoption_ends_when_the_guest_went_back_to_what_the_copy_lies_over() {
        let image = MemoryImage::empty(vec![Region { address: 0, len: SIZE }]);
        let mut memory = Memory::map(image, Mode::Tracked, None).unwrap();
        memory.freeze().unwrap();
        let then = memory.image.clone();
        (8 * MIB..24 * MIB).step_by(PAGE as usize).for_each(|at| put(&memory, at, 5));
        let copy = memory.begin_freeze(None).unwrap().expect("much was changed").finish().unwrap();
        memory.rollback(&then).unwrap();
        assert_eq!(adopt_all(&mut memory, &copy), 0);
        assert!(memory.image.has_same_layers(&then));
        memory.freeze().unwrap();
        let child = Memory::map(memory.image.clone(), Mode::Tracked, None).unwrap();
        assert_eq!(get(&child, 9 * MIB), 0);
    }

    #[test]
    fn adoption_ends_when_the_guest_was_frozen_meanwhile() {
        let (mut memory, image) = forked();
        let mut adoption = Adoption::of(image);
        assert!(memory.adopt(&mut adoption, MIB).unwrap());
        memory.freeze().unwrap();
        put(&memory, 9 * MIB, 9);
        assert!(!memory.adopt(&mut adoption, MIB).unwrap());
        assert_eq!([8, 9, 10].map(|at| get(&memory, at * MIB)), [5, 9, 5]);
        assert_eq!(memory.dirty_pages().unwrap().bytes(), PAGE);
    }
}
