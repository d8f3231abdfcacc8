//! What the first machine of a template has touched tells what its siblings will touch.
//!
//! Which pages a guest's kernel hands out next is known only to the guest, so the children of a
//! running machine are made ready by a guess. The first child shows what was missing in it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pvmm_devices::GuestMemory;

use super::{PageRanges, PageState, REWRITTEN_MAX, WorkingSet, pages};
use crate::ablation::Mechanism;

/// How often the first machine is looked at: it may not have done much at the first time.
const LOOKS: u32 = 3;

/// A working set that begins as a guess and learns.
pub struct WorkingSetLearner {
    progress: Mutex<Progress>,
    guess: Arc<WorkingSet>,
}

struct Progress {
    set: Arc<WorkingSet>,
    first: Option<Arc<FirstMemory>>,
    looks: u32,
}

/// The memory of the first machine, for as long as that lives.
type FirstMemory = Mutex<Option<GuestMemory>>;

/// Kept by the first machine. With it goes the last hold on its memory.
pub struct FirstFork(Arc<FirstMemory>);

impl Drop for FirstFork {
    fn drop(&mut self) {
        *lock(&self.0) = None;
    }
}

impl WorkingSetLearner {
    pub fn new(guess: Arc<WorkingSet>) -> Self {
        let progress = Progress { set: guess.clone(), first: None, looks: 0 };
        Self { progress: Mutex::new(progress), guess }
    }

    /// The machine with the memory `guest` comes to life. What it should have ready, and something
    /// to keep if it is the first.
    pub fn observe(&self, guest: &GuestMemory) -> (Arc<WorkingSet>, Option<FirstFork>) {
        let mut progress = lock(&self.progress);
        if !Mechanism::Learner.in_use() {
            return (progress.set.clone(), None);
        }
        let Some(first) = progress.first.clone() else {
            let first = Arc::new(Mutex::new(Some(guest.clone())));
            progress.first = Some(first.clone());
            return (progress.set.clone(), Some(FirstFork(first)));
        };
        if progress.looks < LOOKS
            && let Some((written, read)) = lock(&first).as_ref().and_then(look)
        {
            progress.looks += 1;
            progress.set = Arc::new(self.learned(&written, &read));
        }
        (progress.set.clone(), None)
    }

    /// The guess with what was `written` and `read` beyond it, short runs first: long ones are
    /// somebody's data.
    fn learned(&self, written: &PageRanges, read: &PageRanges) -> WorkingSet {
        let grown = |guess: &PageRanges, seen: &PageRanges| {
            let (new, _) = seen.difference(guess).shortest(REWRITTEN_MAX);
            guess.union(&new)
        };
        let written = grown(&self.guess.written, written);
        WorkingSet::new(&written, &grown(&self.guess.read, read).difference(&written))
    }
}

/// The pages that a machine has of its own, and those that it has read. The former too if they hold
/// what they held before: a hundred of them are written and put back by a first command, like a
/// lock, and cost it more than the others cost to have ready. The latter with neighbours that the
/// kernel mapped beside them: to have it leave those out, and to end that, would take from KVM all
/// that it has mapped. Only a help, so the machine may run meanwhile; where pages cannot be listed,
/// the guess stays.
fn look(guest: &GuestMemory) -> Option<(PageRanges, PageRanges)> {
    Some((
        pages::scan(guest, PageState::Private).ok()?,
        pages::scan(guest, PageState::FileMapped).ok()?,
    ))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::super::{Memory, MemoryImage, Mode, PAGE, Region};
    use super::*;

    fn memory() -> Memory {
        let region = Region { address: 0, len: 64 << 20 };
        Memory::map(MemoryImage::empty(vec![region]), Mode::Tracked).unwrap()
    }

    fn write(memory: &Memory, pages: std::ops::Range<u64>) {
        pages.for_each(|page| memory.guest.write_obj(1u8, GuestAddress(page * PAGE)).unwrap());
    }

    fn run(pages: std::ops::Range<u64>) -> PageRanges {
        PageRanges::one(pages.start * PAGE..pages.end * PAGE)
    }

    #[test]
    fn sibling_has_ready_what_the_first_wrote_beyond_the_guess() {
        let guess = WorkingSet { written: run(0..2), read: run(8..12) };
        let learner = WorkingSetLearner::new(Arc::new(guess.clone()));
        let (first, second) = (memory(), memory());
        let (set, kept) = learner.observe(&first.guest);
        assert!(kept.is_some() && *set == guess);
        write(&first, 10..11);
        write(&first, 1000..9000);
        let (set, none) = learner.observe(&second.guest);
        assert!(none.is_none());
        assert_eq!(set.written.difference(&run(0..2)), run(10..11));
        assert_eq!(set.read, guess.read);
    }

    #[test]
    fn sibling_has_ready_what_the_first_wrote_and_put_back() {
        let learner = WorkingSetLearner::new(Arc::new(WorkingSet::default()));
        let (first, second) = (memory(), memory());
        let _kept = learner.observe(&first.guest);
        write(&first, 10..11);
        first.guest.write_obj(0u8, GuestAddress(10 * PAGE)).unwrap();
        assert_eq!(learner.observe(&second.guest).0.written, run(10..11));
    }

    #[test]
    fn sibling_has_ready_what_the_first_read_beyond_the_guess() {
        let mut parent = memory();
        write(&parent, 0..200);
        parent.freeze().unwrap();
        let learner =
            WorkingSetLearner::new(Arc::new(WorkingSet { written: run(0..2), read: run(8..12) }));
        let [first, second] =
            [(); 2].map(|()| Memory::map(parent.image.clone(), Mode::Tracked).unwrap());
        let _kept = learner.observe(&first.guest);
        first.guest.read_obj::<u8>(GuestAddress(100 * PAGE)).unwrap();
        let set = learner.observe(&second.guest).0;
        assert_eq!(set.written, run(0..2));
        assert_eq!(set.read.intersection(&run(8..12)), run(8..12));
        assert_eq!(set.read.intersection(&run(100..101)), run(100..101));
    }

    #[test]
    fn memory_of_a_first_machine_that_ended_is_let_go() {
        let learner = WorkingSetLearner::new(Arc::default());
        let (first, second) = (memory(), memory());
        let (_, kept) = learner.observe(&first.guest);
        write(&first, 1..2);
        drop(kept);
        assert!(lock(lock(&learner.progress).first.as_ref().unwrap()).is_none());
        assert_eq!(*learner.observe(&second.guest).0, WorkingSet::default());
    }
}
