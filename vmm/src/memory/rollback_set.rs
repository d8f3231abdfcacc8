//! Which pages a machine writes again at once when it was taken back, so that it finds them in
//! their place.
//!
//! Short runs are what its kernel and its agent keep writing. The pages that the kernel hands out
//! first after the checkpoint are others: they lie among the long runs of somebody's data, and only
//! the guest knows which they are. So its first lives are looked at, a moment after they began.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pvmm_devices::GuestMemory;

use super::{PageRanges, PageState, REWRITTEN_MAX, pages};
use crate::ablation::Mechanism;

/// When a first command has run, and little else.
const LOOK_AFTER: Duration = Duration::from_millis(100);
/// How many lives are looked at: one may begin with something else.
const LOOKS: u32 = 3;

/// What is known about the lives after one checkpoint.
#[derive(Default)]
pub struct RollbackWorkingSet {
    known: Arc<Mutex<Known>>,
    looks: u32,
    looking: Option<Looking>,
}

#[derive(Default)]
struct Known {
    /// What was left in place when the last life began.
    kept: PageRanges,
    /// What was written beyond that, early in a life.
    seen: PageRanges,
}

/// A thread that waits for its moment. Dropping this calls it off.
struct Looking {
    alive: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl RollbackWorkingSet {
    /// Which of the `private` pages to leave in place, with their old bytes; a life begins.
    pub fn keep(&mut self, private: &PageRanges) -> PageRanges {
        self.looking = None;
        let mut known = lock(&self.known);
        let (short, _) = private.shortest(REWRITTEN_MAX);
        let seen = private.intersection(&known.seen);
        known.kept = short.union(&seen);
        known.kept.clone()
    }

    /// Looks at the life that has begun, once it is a moment old. Only a help: without it the guest
    /// takes more faults.
    pub fn learn(&mut self, guest: &GuestMemory) {
        if self.looks == LOOKS || !Mechanism::RollbackSet.in_use() {
            return;
        }
        self.looks += 1;
        let (alive, ended) = mpsc::channel();
        let (known, guest) = (self.known.clone(), guest.clone());
        let look = move || {
            if ended.recv_timeout(LOOK_AFTER) == Err(RecvTimeoutError::Timeout) {
                lock(&known).look(&guest);
            }
        };
        let thread = thread::Builder::new().name("pvmm-look".into()).spawn(look).ok();
        self.looking = Some(Looking { alive: Some(alive), thread });
    }
}

impl Known {
    /// Short runs first: long ones are somebody's data.
    fn look(&mut self, guest: &GuestMemory) {
        let Ok(private) = pages::scan(guest, PageState::Private) else { return };
        let (new, _) = private.difference(&self.kept).shortest(REWRITTEN_MAX);
        self.seen = self.seen.union(&new);
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.alive = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use vm_memory::{Bytes, GuestAddress};

    use super::super::{Memory, MemoryImage, Mode, PAGE, Region};
    use super::*;

    const DATA: std::ops::Range<u64> = 1000..9000;

    fn memory() -> Memory {
        let region = Region { address: 0, len: 64 << 20 };
        let mut memory = Memory::map(MemoryImage::empty(vec![region]), Mode::Tracked).unwrap();
        write(&memory, DATA, 7);
        memory.freeze().unwrap();
        memory
    }

    fn write(memory: &Memory, mut pages: std::ops::Range<u64>, byte: u8) {
        pages.try_for_each(|page| memory.guest.write_obj(byte, GuestAddress(page * PAGE))).unwrap();
    }

    fn private(memory: &Memory) -> PageRanges {
        memory.dirty_pages().unwrap()
    }

    #[test]
    fn page_of_a_long_run_that_is_written_first_is_in_place_the_next_time() {
        let mut memory = memory();
        let image = memory.image.clone();
        for known in [false, true] {
            write(&memory, DATA, 1);
            memory.rollback(&image).unwrap();
            let expected = if known { 1 } else { 0 };
            assert_eq!(private(&memory).bytes(), expected * PAGE);
            for page in [DATA.start, 2000] {
                assert_eq!(memory.guest.read_obj::<u8>(GuestAddress(page * PAGE)).unwrap(), 7);
            }
            write(&memory, 2000..2001, 2);
            memory.learn();
            let late = Instant::now() + 100 * LOOK_AFTER;
            while lock(&memory.rollback_set.known).seen.bytes() == 0 {
                assert!(Instant::now() < late, "nobody looks");
                thread::yield_now();
            }
        }
    }

    #[test]
    fn look_that_is_called_off_is_not_waited_for() {
        let (memory, begun) = (memory(), Instant::now());
        let mut rollback_set = RollbackWorkingSet::default();
        for _ in 0..2 * LOOKS {
            rollback_set.keep(&PageRanges::default());
            rollback_set.learn(&memory.guest);
        }
        assert_eq!(rollback_set.looks, LOOKS);
        drop(rollback_set);
        assert!(begun.elapsed() < LOOKS * LOOK_AFTER);
    }
}
