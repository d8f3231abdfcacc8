//! Memory against what a guest would see of it: no guest is needed to write pages.

use vm_memory::{Bytes, GuestAddress};

use super::*;

const HIGH: u64 = 1 << 32;

/// 1 MiB at zero and 1 MiB above the hole.
fn small() -> Memory {
    let regions = vec![Region { address: 0, len: 1 << 20 }, Region { address: HIGH, len: 1 << 20 }];
    Memory::map(MemoryImage::empty(regions), Mode::Tracked, None).unwrap()
}

fn put(memory: &Memory, address: u64, value: u8) {
    memory.guest.write_slice(&[value; 8], GuestAddress(address)).unwrap();
}

fn get(memory: &Memory, address: u64) -> u8 {
    let mut bytes = [0xee; 8];
    memory.guest.read_slice(&mut bytes, GuestAddress(address)).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

#[test]
fn private_runs_are_the_pages_that_were_written() {
    let memory = small();
    assert_eq!(memory.dirty_pages().unwrap(), PageRanges::default());
    assert_eq!(get(&memory, 0x3000), 0, "a page that was only read is not changed");
    put(&memory, 0x5000, 1);
    put(&memory, HIGH + 0x1ff8, 2);
    let runs: Vec<_> = memory.dirty_pages().unwrap().iter().collect();
    let high = (1 << 20) + 0x1000;
    // Transparent huge pages may give the guest more than it asked for, never less.
    assert!(runs.iter().any(|run| run.contains(&0x5000)), "{runs:?}");
    assert!(runs.iter().any(|run| run.contains(&high)), "{runs:?}");
}

#[test]
fn private_runs_are_listed_once_however_many_there_are() {
    let region = Region { address: 0, len: 32 << 20 };
    for count in [511, 512, 513, 700, 1023, 1024, 1025, 1600, 3000] {
        let memory = Memory::map(MemoryImage::empty(vec![region]), Mode::Tracked, None).unwrap();
        pages::advise(&memory.guest, 0..region.len, libc::MADV_NOHUGEPAGE).unwrap();
        (0..count).for_each(|page| put(&memory, page * 2 * PAGE, 1));
        let expected = (0..count).map(|page| page * 2 * PAGE..(page * 2 + 1) * PAGE).collect();
        assert_eq!(memory.dirty_pages().unwrap(), PageRanges::merged(expected), "{count} runs");
    }
}

#[test]
fn frozen_memory_reads_the_same_and_nothing_is_private_any_more() {
    let mut memory = small();
    put(&memory, 0x5000, 1);
    put(&memory, HIGH, 2);
    memory.freeze().unwrap();
    assert_eq!(memory.dirty_pages().unwrap(), PageRanges::default());
    assert_eq!((get(&memory, 0x5000), get(&memory, HIGH), get(&memory, 0x6000)), (1, 2, 0));
}

#[test]
fn trim_gives_back_only_what_holds_what_lies_under_it() {
    let mut memory = small();
    put(&memory, 0x5000, 1);
    memory.freeze().unwrap();
    for (address, value) in [(0x5000, 9), (0x5000, 1), (0x7000, 9), (0x7000, 0), (HIGH, 7)] {
        put(&memory, address, value);
    }
    assert_eq!(memory.trim().unwrap(), 2 * PAGE);
    let left = memory.dirty_pages().unwrap();
    assert_eq!(left, PageRanges::one(1 << 20..(1 << 20) + PAGE));
    assert_eq!([0x5000, 0x7000, HIGH].map(|at| get(&memory, at)), [1, 0, 7]);
}

#[test]
fn trim_after_a_save_keeps_what_the_next_one_must_hold() {
    let mut memory = small();
    put(&memory, 0x5000, 1);
    let base = flat(&memory);
    memory.mark_saved();
    put(&memory, 0x5000, 0);
    assert_eq!(memory.trim().unwrap(), 0);
    assert_eq!(diff_over(&memory, &base).0, flat(&memory));
}

#[test]
fn rewind_returns_to_the_freeze_and_only_drops_what_changed() {
    let mut memory = small();
    put(&memory, 0x5000, 1);
    memory.freeze().unwrap();
    let then = memory.image.clone();
    for value in 3..6 {
        put(&memory, 0x5000, value);
        put(&memory, 0x9000, value);
        memory.rollback(&then).unwrap();
        assert_eq!((get(&memory, 0x5000), get(&memory, 0x9000)), (1, 0));
    }
}

#[test]
fn memory_goes_to_any_freeze_of_any_branch() {
    let mut memory = small();
    let mut kept = Vec::new();
    let mut keep = |memory: &mut Memory, value| {
        put(memory, 0x5000, value);
        put(memory, 0x5000 + u64::from(value) * 0x1000, value);
        memory.freeze().unwrap();
        kept.push((memory.image.clone(), flat(memory)));
        memory.image.clone()
    };
    let root = keep(&mut memory, 1);
    (2..5).for_each(|value| drop(keep(&mut memory, value)));
    memory.rollback(&root).unwrap();
    (5..7).for_each(|value| drop(keep(&mut memory, value)));
    for step in 0..2 * kept.len() {
        let (image, bytes) = &kept[step * 4 % kept.len()];
        put(&memory, 0x5000, 9);
        memory.rollback(image).unwrap();
        assert_eq!(flat(&memory), *bytes, "step {step}");
    }
}

#[test]
fn rewind_of_short_runs_leaves_the_pages_and_of_long_ones_drops_them() {
    let regions = vec![Region { address: 0, len: 16 << 20 }];
    let mut memory = Memory::map(MemoryImage::empty(regions), Mode::Tracked, None).unwrap();
    let layers = [(0x5000, 1), (0x9000, 2), (8 << 20, 3)];
    for (address, value) in layers {
        put(&memory, address, value);
        memory.freeze().unwrap();
    }
    let then = memory.image.clone();
    for address in [0x5000, 0x9000, 0xd000].into_iter().chain((8 << 20..12 << 20).step_by(0x1000)) {
        put(&memory, address, 9);
    }
    memory.rollback(&then).unwrap();
    let left: Vec<_> = memory.dirty_pages().unwrap().iter().collect();
    assert_eq!(left, [0x5000..0x6000, 0x9000..0xa000, 0xd000..0xe000]);
    assert!(layers.iter().all(|(address, value)| get(&memory, *address) == *value));
    assert_eq!((get(&memory, 0xd000), get(&memory, 9 << 20)), (0, 0));
}

#[test]
fn shortest_runs_are_taken_until_the_budget_is_spent() {
    let runs = PageRanges::merged(vec![0..0x4000, 0x5000..0x6000, 0x8000..0xa000, 0xb000..0xc000]);
    let (short, long) = runs.shortest(0x4000);
    assert_eq!(short.iter().collect::<Vec<_>>(), [0x5000..0x6000, 0x8000..0xa000, 0xb000..0xc000]);
    assert_eq!(long, PageRanges::all(0x4000));
    assert_eq!(runs.shortest(0).0, PageRanges::default());
}

#[test]
fn rewind_goes_back_over_what_was_frozen_since() {
    let mut memory = small();
    put(&memory, 0x5000, 1);
    memory.freeze().unwrap();
    let then = memory.image.clone();
    for value in 3..6 {
        put(&memory, 0x5000, value);
        put(&memory, HIGH, value);
        memory.freeze().unwrap();
        put(&memory, 0x9000, value);
        memory.rollback(&then).unwrap();
        assert_eq!((get(&memory, 0x5000), get(&memory, HIGH), get(&memory, 0x9000)), (1, 0, 0));
        assert_eq!(memory.dirty_pages().unwrap(), PageRanges::default());
    }
}

#[test]
fn image_that_was_flattened_is_not_its_base_any_more() {
    let mut memory = small();
    put(&memory, 0x5000, 1);
    memory.freeze().unwrap();
    memory.image = memory.image.clone().on_base(1);
    assert_eq!(memory.image.copy_to_memfd().unwrap().base_layers(), 1);
    for layer in 0..20u8 {
        put(&memory, 0x5000, layer);
        memory.freeze().unwrap();
    }
    assert_eq!(memory.image.base_layers(), 0);
}

#[test]
fn mappings_of_one_image_do_not_see_each_other() {
    let mut parent = small();
    put(&parent, 0x5000, 1);
    put(&parent, 0x7000, 7);
    parent.freeze().unwrap();
    let child = Memory::map(parent.image.clone(), Mode::Tracked, None).unwrap();
    put(&parent, 0x5000, 2);
    put(&child, 0x7000, 3);
    assert_eq!((get(&parent, 0x5000), get(&child, 0x5000)), (2, 1));
    assert_eq!((get(&parent, 0x7000), get(&child, 0x7000)), (7, 3));
}

#[test]
fn zeros_written_over_a_layer_stay_zeros() {
    let mut memory = small();
    put(&memory, 0x5000, 1);
    memory.freeze().unwrap();
    put(&memory, 0x5000, 0);
    memory.freeze().unwrap();
    assert_eq!(get(&memory, 0x5000), 0);
    assert_eq!(
        get(
            &Memory::map(memory.image.copy_to_memfd().unwrap(), Mode::Tracked, None).unwrap(),
            0x5000
        ),
        0
    );
}

#[test]
fn image_of_many_layers_is_flattened_and_reads_the_same() {
    let mut memory = small();
    for layer in 1..40u8 {
        put(&memory, u64::from(layer) * 0x2000, layer);
        put(&memory, HIGH, layer);
        memory.freeze().unwrap();
    }
    assert!(memory.image.layers().len() <= 17);
    let child = Memory::map(memory.image.clone(), Mode::Tracked, None).unwrap();
    for layer in 1..40u8 {
        assert_eq!(get(&child, u64::from(layer) * 0x2000), layer);
    }
    assert_eq!(get(&child, HIGH), 39);
}

#[test]
fn image_reads_as_its_guest_whatever_the_layers_and_holes() {
    let mut memory = small();
    for (first, second) in [(1, 2), (0, 3), (4, 0)] {
        put(&memory, 0x5000, first);
        put(&memory, 0x8000, second);
        put(&memory, HIGH, second);
        memory.freeze().unwrap();
        let mut bytes = vec![0xee; 2 << 20];
        let data = memory.image.read(0, 0, &mut bytes).unwrap();
        assert_eq!((bytes[0x5000], bytes[0x8000], bytes[1 << 20]), (first, second, second));
        assert_eq!((bytes[0], bytes[0x9000], bytes[0x5008]), (0, 0, 0));
        assert!((0x1000..1 << 20).contains(&data), "{data}");
        let mut part = vec![0xee; 0x2000];
        memory.image.read(0, 0x7000, &mut part).unwrap();
        assert_eq!((part[0], part[0x1000]), (0, second));
    }
}

#[test]
fn sealed_layer_cannot_be_written_or_cut() {
    use std::os::unix::fs::FileExt;
    let mut memory = small();
    put(&memory, 0x5000, 1);
    memory.freeze().unwrap();
    let file = &memory.image.layers()[0].file;
    assert!(file.write_all_at(b"x", 0x5000).is_err());
    assert!(file.set_len(0).is_err());
    assert!(pvmm_devices::sparse::punch(file, 0x5000..0x6000).is_err());
    assert_eq!(get(&memory, 0x5000), 1);
}

#[test]
fn memory_frozen_beside_a_running_guest_is_as_it_was_then() {
    let mut memory = small();
    put(&memory, 0x5000, 1);
    put(&memory, 0x6000, 2);
    memory.freeze().unwrap();
    put(&memory, 0x5000, 3);
    put(&memory, 0x9000, 4);
    put(&memory, HIGH + 0x3000, 5);
    let runs = memory.dirty_pages().unwrap();
    let freezing =
        memory.image.begin_freeze(&memory.guest, &runs, None).unwrap().expect("a process");
    // The guest goes on while it is copied.
    put(&memory, 0x5000, 9);
    put(&memory, 0xa000, 9);
    let child = Memory::map(freezing.finish().unwrap(), Mode::Tracked, None).unwrap();
    let seen = [0x5000, 0x6000, 0x9000, 0xa000, HIGH + 0x3000].map(|at| get(&child, at));
    assert_eq!(seen, [3, 2, 4, 0, 5]);
    assert_eq!((get(&memory, 0x5000), get(&memory, 0xa000)), (9, 9));
    // A second freeze knows all changes since the layer below, also those that the first has
    // copied.
    let runs = memory.dirty_pages().unwrap();
    let again = memory.image.begin_freeze(&memory.guest, &runs, None).unwrap().expect("a process");
    let child = Memory::map(again.finish().unwrap(), Mode::Tracked, None).unwrap();
    let seen = [0x5000, 0x6000, 0x9000, 0xa000, HIGH + 0x3000].map(|at| get(&child, at));
    assert_eq!(seen, [9, 2, 4, 9, 5]);
}

#[test]
fn freeze_beside_that_is_given_up_leaves_no_process() {
    let memory = small();
    put(&memory, 0x5000, 1);
    let runs = memory.dirty_pages().unwrap();
    drop(memory.image.begin_freeze(&memory.guest, &runs, None).unwrap().expect("a process"));
    assert_eq!(get(&memory, 0x5000), 1);
}

#[test]
fn working_set_is_what_was_touched_and_is_ready_in_the_next_mapping() {
    let mut parent = small();
    for page in 0..200 {
        put(&parent, page * PAGE, 1);
    }
    parent.freeze().unwrap();
    let first = Memory::map(parent.image.clone(), Mode::Tracked, None).unwrap();
    let each_page = first.without_fault_around();
    get(&first, 0x40_000);
    put(&first, 0x60_000, 2);
    let touched = first.touched().unwrap();
    let pages = |runs: &PageRanges| runs.iter().map(|run| (run.start, run.end)).collect::<Vec<_>>();
    assert_eq!(pages(&touched.written), [(0x60_000, 0x61_000)]);
    if each_page.is_some() {
        assert_eq!(pages(&touched.read), [(0x40_000, 0x41_000)])
    } else {
        assert!(touched.read.iter().any(|run| run.contains(&0x40_000)))
    }

    let second = Memory::map(parent.image.clone(), Mode::Tracked, None).unwrap();
    touched.prefault(&second.guest);
    assert_eq!(second.dirty_pages().unwrap(), touched.written);
    let shared = pages::scan(&second.guest, None, sys::PageState::FileMapped).unwrap();
    assert!(shared.iter().any(|run| run.contains(&0x40_000)), "{shared:?}");
    assert_eq!((get(&second, 0x60_000), get(&second, 0x40_000)), (1, 1));
    assert_eq!(touched.guest_ranges(&second.guest), [(0x40_000, PAGE), (0x60_000, PAGE)]);
}

#[test]
fn working_set_of_forks_of_forks_does_not_grow() {
    const MIB: u64 = 1 << 20;
    let mut set = WorkingSet::default();
    for generation in 0..20 {
        // Each generation writes 2 MiB elsewhere, in runs of a page.
        let pages = (0..512).map(|page| generation * 4 * MIB + page * 2 * PAGE);
        let written = PageRanges::merged(pages.map(|at| at..at + PAGE).collect());
        set = WorkingSet::guess(&written, Some(&set));
        assert!(set.written.bytes() <= 4 * MIB, "generation {generation}: {}", set.written.bytes());
    }
}

#[test]
fn working_set_of_children_is_the_parents_own_and_the_short_runs_it_has_written() {
    let runs =
        |parts: &[(u64, u64)]| PageRanges::merged(parts.iter().map(|(a, b)| *a..*b).collect());
    let own =
        WorkingSet::new(&runs(&[(0, 0x2000), (0x80000, 0x81000)]), &runs(&[(0x3000, 0x4000)]));
    let guess = WorkingSet::guess(&runs(&[(0x2000, 0x3000), (0x80_0000, 0x120_0000)]), Some(&own));
    assert_eq!(guess.written, runs(&[(0, 0x3000), (0x80000, 0x81000)]));
    assert_eq!(guess.read, runs(&[(0x3000, 0x4000)]));
}

#[test]
fn working_set_that_claims_everything_is_not_made_ready() {
    let huge = vec![Region { address: 0, len: 1 << 40 }];
    let memory = Memory::map(MemoryImage::empty(huge), Mode::Tracked, None).unwrap();
    let all = PageRanges::all(1 << 40);
    let trap = WorkingSet { written: all.clone(), read: all };
    trap.prefault(&memory.guest);
    assert_eq!(memory.dirty_pages().unwrap(), PageRanges::default());
    assert!(trap.guest_ranges(&memory.guest).is_empty());
}

fn flat(memory: &Memory) -> Vec<u8> {
    let file = tempfile::NamedTempFile::new().unwrap();
    memory.write_flat(file.as_file(), &memory.nonzero_ranges(true).unwrap()).unwrap();
    std::fs::read(file.path()).unwrap()
}

/// Writes a diff of `memory` over `base`. Returns the file, and the pages that were written.
fn diff_over(memory: &Memory, base: &[u8]) -> (Vec<u8>, PageRanges) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), base).unwrap();
    let changed = memory.dirty_since_save().unwrap();
    memory.write_over(file.as_file(), &changed).unwrap();
    (std::fs::read(file.path()).unwrap(), changed)
}

#[test]
fn flat_file_has_every_byte_at_its_place_and_holes_elsewhere() {
    let memory = small();
    put(&memory, 0x5000, 1);
    put(&memory, HIGH + 0x1000, 2);
    let file = tempfile::tempfile().unwrap();
    memory.write_flat(&file, &memory.nonzero_ranges(true).unwrap()).unwrap();
    assert!(std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512 < 1 << 20);
    let bytes = flat(&memory);
    assert_eq!(bytes.len(), 2 << 20);
    assert_eq!((bytes[0x5000], bytes[0x101000], bytes[0x6000]), (1, 2, 0));

    // Over an image too, with what is private on top; and mapped again it reads the same.
    let image = MemoryImage::empty(memory.image.regions().to_vec());
    let layer = Layer::new(file.into(), PageRanges::all(2 << 20));
    let again = Memory::map(image.with(layer), Mode::Tracked, None).unwrap();
    put(&again, 0x5000, 3);
    put(&again, HIGH + 0x1000, 0);
    let bytes = flat(&again);
    assert_eq!((bytes[0x5000], bytes[0x101000], bytes[0x6000]), (3, 0, 0));
}

#[test]
fn diff_since_a_save_holds_what_was_written_later_and_zeros_too() {
    let mut memory = small();
    put(&memory, 0x5000, 1);
    put(&memory, 0x9000, 1);
    put(&memory, HIGH, 1);
    let base = flat(&memory);
    memory.mark_saved();
    assert_eq!(memory.dirty_since_save().unwrap(), PageRanges::default());
    put(&memory, 0x5000, 0);
    put(&memory, 0xa000, 4);
    assert_eq!(get(&memory, 0x9000), 1, "reading changes nothing");
    let (merged, changed) = diff_over(&memory, &base);
    assert_eq!(merged, flat(&memory));
    assert_eq!(changed.bytes(), 2 * PAGE, "{changed:?}");

    // The next one begins where this one ended; a checkpoint between loses nothing.
    memory.mark_saved();
    put(&memory, 0x9000, 6);
    memory.freeze().unwrap();
    put(&memory, HIGH + 0x3000, 7);
    let (again, _) = diff_over(&memory, &merged);
    assert_eq!(again, flat(&memory));
}

#[test]
fn diff_without_a_save_holds_all_that_changed_since_the_load() {
    let mut memory = small();
    put(&memory, 0x5000, 1);
    memory.freeze().unwrap();
    let image = memory.image.clone();
    let base = flat(&memory);
    let loaded = Memory::map(image.clone(), Mode::Tracked, None).unwrap();
    assert_eq!(loaded.dirty_since_save().unwrap(), PageRanges::default());
    put(&loaded, 0x7000, 2);
    let (merged, changed) = diff_over(&loaded, &base);
    assert_eq!((merged, changed.bytes()), (flat(&loaded), PAGE));
    // After a rollback nobody knows what the last save had.
    let mut loaded = loaded;
    loaded.rollback(&image).unwrap();
    assert_eq!(loaded.dirty_since_save().unwrap(), PageRanges::all(2 << 20));
}

#[test]
fn sums_are_of_all_memory_and_taken_again_only_where_it_changed() {
    let memory = small();
    put(&memory, 0x5000, 7);
    let asked = std::cell::Cell::new(0);
    let sum = |bytes: &[u8]| {
        asked.set(asked.get() + 1);
        crc32fast::hash(bytes)
    };
    let (piece, all) = (1 << 16, PageRanges::all(2 << 20));
    let filled = memory.nonzero_ranges(true).unwrap();
    let sums = memory.sums(piece, sum, None, &all, &filled).unwrap();
    let expected: Vec<_> = flat(&memory).chunks(1 << 16).map(crc32fast::hash).collect();
    assert_eq!(sums, expected);
    assert_eq!(asked.get(), 2, "one for the zeros, one for the piece that is not");
    put(&memory, 0x15000, 8);
    let changed = PageRanges::merged(std::iter::once(0x15000..0x16000).collect());
    let filled = memory.nonzero_ranges(true).unwrap();
    let again = memory.sums(piece, sum, Some(&sums), &changed, &filled).unwrap();
    let expected: Vec<_> = flat(&memory).chunks(1 << 16).map(crc32fast::hash).collect();
    assert_eq!((again, asked.get()), (expected, 4));
}

const MIB: u64 = 1 << 20;

/// 8 MiB at zero, of which the first page has something, and 8 MiB above the hole, as a VM gets it
/// that was made of a template.
fn restored() -> Memory {
    let regions = vec![Region { address: 0, len: 8 * MIB }, Region { address: HIGH, len: 8 * MIB }];
    let mut parent = Memory::map(MemoryImage::empty(regions), Mode::Tracked, None).unwrap();
    put(&parent, 0, 1);
    parent.freeze().unwrap();
    child_of(parent.image)
}

fn child_of(image: MemoryImage) -> Memory {
    Memory::map(image, Mode::Private, None).unwrap()
}

/// Minor faults of this thread.
fn faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let (_, after_name) = stat.rsplit_once(") ").unwrap();
    after_name.split(' ').nth(7).unwrap().parse().unwrap()
}

/// Whether this host gives huge pages to who asks for them.
fn has_huge_pages() -> bool {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    setting.is_ok_and(|setting| !setting.contains("[never]"))
}

#[test]
fn new_memory_comes_in_huge_pages_and_near_pages_that_are_prefaulted_in_small_ones() {
    let grown = |memory: &Memory, range: std::ops::Range<u64>| {
        let before = faults();
        range.step_by(PAGE as usize).for_each(|at| put(memory, at, 3));
        faults() - before
    };
    let memory = restored();
    let all = grown(&memory, 2 * MIB..8 * MIB);
    if has_huge_pages() {
        assert!(all <= 8 * 6, "{all} faults in 6 MiB");
    }
    let one = WorkingSet::new(&PageRanges::one(3 * MIB..3 * MIB + PAGE), &PageRanges::default());
    let memory = Memory::map(restored().image, Mode::Private, Some(&one)).unwrap();
    put(&memory, 3 * MIB, 3);
    assert_eq!(memory.dirty_pages().unwrap().bytes(), PAGE);
    assert!(grown(&memory, 2 * MIB..4 * MIB) > 500);
}

#[test]
fn memory_that_was_new_is_in_the_layer_of_a_freeze() {
    let mut parent = restored();
    put(&parent, 0, 2);
    put(&parent, 6 * MIB, 3);
    put(&parent, HIGH + 4 * MIB, 4);
    parent.freeze().unwrap();
    let layer = parent.image.layers().last().unwrap();
    let blocks = std::os::unix::fs::MetadataExt::blocks(&layer.file.metadata().unwrap());
    assert_eq!(blocks * 512 / PAGE, 3, "zeros of a huge page are not kept");
    let child = child_of(parent.image.clone());
    for (value, at) in [(7, 6 * MIB), (8, 4 * MIB), (9, HIGH + 6 * MIB)] {
        put(&parent, at, value);
    }
    assert_eq!([0, 4 * MIB, 6 * MIB, HIGH + 4 * MIB].map(|at| get(&child, at)), [2, 0, 3, 4]);
    assert_eq!([0, 4 * MIB, 6 * MIB, HIGH + 4 * MIB].map(|at| get(&parent, at)), [2, 8, 7, 4]);
    assert_eq!(get(&child, HIGH + 6 * MIB), 0);
}

#[test]
fn memory_that_was_new_stays_as_it_was_while_the_guest_runs_on() {
    let regions = vec![Region { address: 0, len: 64 * MIB }];
    let mut parent = Memory::map(MemoryImage::empty(regions), Mode::Tracked, None).unwrap();
    (0..8 * MIB).step_by(PAGE as usize).for_each(|at| put(&parent, at, 1));
    parent.freeze().unwrap();
    let mut parent = child_of(parent.image);
    for generation in 2..6u8 {
        let new = u64::from(generation) * 8 * MIB;
        (0..8 * MIB).step_by(PAGE as usize).for_each(|at| put(&parent, at, generation));
        put(&parent, new, generation);
        let freezing = parent.begin_freeze(None).unwrap().expect("much was changed");
        // The guest goes on while it is copied.
        for at in [0, new, new + MIB] {
            put(&parent, at, 99);
        }
        let child = child_of(freezing.finish().unwrap());
        let seen = [0, 4 * MIB, new, new + MIB].map(|at| get(&child, at));
        assert_eq!(seen, [generation, generation, generation, 0]);
        if generation > 2 {
            assert_eq!(get(&child, new - 8 * MIB), 99, "what the parent did between two forks");
        }
    }
}

#[test]
fn machine_that_was_forked_often_lies_over_few_layers() {
    let mut parent = restored();
    for round in 1..60 {
        put(&parent, 2 * MIB + round % 32 * 3 * PAGE, 1 + round as u8);
        parent.freeze().unwrap();
        let child = child_of(parent.image.clone());
        assert_eq!(get(&child, 2 * MIB + round % 32 * 3 * PAGE), 1 + round as u8);
        assert!(parent.image.layers().len() <= 17);
    }
}

#[test]
fn machine_with_a_checkpoint_goes_back_in_memory_that_was_new() {
    let mut memory = restored();
    put(&memory, 6 * MIB, 3);
    memory.freeze().unwrap();
    let then = memory.image.clone();
    for value in 4..7 {
        put(&memory, 6 * MIB, value);
        put(&memory, HIGH + 4 * MIB, value);
        memory.rollback(&then).unwrap();
        assert_eq!([0, 6 * MIB, HIGH + 4 * MIB].map(|at| get(&memory, at)), [1, 3, 0]);
    }
    // So does its child.
    let mut memory = child_of(then.clone());
    put(&memory, 6 * MIB, 9);
    put(&memory, HIGH + 4 * MIB, 9);
    memory.rollback(&then).unwrap();
    assert_eq!([0, 6 * MIB, HIGH + 4 * MIB].map(|at| get(&memory, at)), [1, 3, 0]);
}

#[test]
fn trim_gives_back_what_was_new_and_is_zero_again() {
    let mut memory = Memory::map(restored().image, Mode::Tracked, None).unwrap();
    for (at, value) in [(6 * MIB, 3), (6 * MIB, 0), (7 * MIB, 4), (0, 5), (0, 1)] {
        put(&memory, at, value);
    }
    assert_eq!(memory.trim().unwrap(), 2 * PAGE);
    assert_eq!(memory.dirty_pages().unwrap(), PageRanges::one(7 * MIB..7 * MIB + PAGE));
    assert_eq!([0, 6 * MIB, 7 * MIB].map(|at| get(&memory, at)), [1, 0, 4]);
}

#[test]
fn diff_since_a_save_holds_what_was_new_after_it() {
    for mode in [Mode::Tracked, Mode::Private] {
        let mut memory = Memory::map(restored().image, mode, None).unwrap();
        let unit = if mode == Mode::Tracked { PAGE } else { HUGE_PAGE };
        put(&memory, 6 * MIB, 3);
        let base = flat(&memory);
        let before = diff_over(&memory, &vec![0; 16 << 20]).1;
        assert_eq!(before.blocks(unit), PageRanges::one(6 * MIB..6 * MIB + unit), "{mode:?}");
        memory.mark_saved();
        put(&memory, 6 * MIB, 4);
        put(&memory, HIGH + 4 * MIB, 5);
        let (merged, changed) = diff_over(&memory, &base);
        assert_eq!(merged, flat(&memory));
        assert_eq!(changed.blocks(unit).bytes(), 2 * unit, "{mode:?}: {changed:?}");
    }
}

#[test]
fn unbacked_is_what_no_layer_has_anything_for() {
    let memory = restored();
    assert_eq!(*memory.image.unbacked(), PageRanges::one(2 * MIB..16 * MIB));
    let known = memory.image.copy_to_memfd().unwrap();
    assert_eq!(*known.unbacked(), PageRanges::one(2 * MIB..16 * MIB), "found out from the file");
    let file = sys::memfd(c"test", 16 * MIB).unwrap();
    let more = known.with(Layer::new(file.into(), PageRanges::one(7 * MIB..9 * MIB)));
    assert_eq!(more.unbacked().iter().collect::<Vec<_>>(), [2 * MIB..6 * MIB, 10 * MIB..16 * MIB]);
}

#[test]
#[ignore = "run by the next test, which limits its files"]
fn lives_with_small_files() {
    let regions = vec![Region { address: 0, len: 8 * MIB }];
    let mut memory = child_of(MemoryImage::empty(regions));
    put(&memory, 4 * MIB, 3);
    assert!(matches!(memory.freeze(), Err(MemoryError::Keep(_))));
    assert_eq!(get(&memory, 4 * MIB), 3);
}

#[test]
fn process_that_may_not_make_large_files_is_not_ended_for_it() {
    let command =
        "ulimit -f 1024; exec \"$0\" --exact memory::tests::lives_with_small_files --ignored";
    let exe = std::env::current_exe().unwrap();
    let output = std::process::Command::new("sh").args(["-c", command]).arg(exe).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{:?} {said}", output.status);
}

/// The flags of every mapping of this process that has pages of guest memory.
fn flags_of(memory: &Memory) -> Vec<String> {
    let ours = pages::host_parts(&memory.guest, 0..memory.image.size());
    let ours = |start: usize| {
        ours.iter().any(|(address, part)| {
            let first = *address as usize;
            (first..first + (part.end - part.start) as usize).contains(&start)
        })
    };
    let (mut flags, mut within) = (Vec::new(), false);
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let start =
            line.split_once('-').and_then(|(start, _)| usize::from_str_radix(start, 16).ok());
        within = start.map_or(within, ours);
        if let Some(found) = line.strip_prefix("VmFlags:").filter(|_| within) {
            flags.push(found.to_owned());
        }
    }
    flags
}

#[test]
fn guest_memory_is_left_out_of_core_dumps_whatever_was_mapped_since() {
    let mut memory = small();
    let check = |memory: &Memory, count: usize| {
        let flags = flags_of(memory);
        assert!(flags.len() >= count, "{flags:?}");
        assert!(flags.iter().all(|flags| flags.split(' ').any(|flag| flag == "dd")), "{flags:?}");
    };
    check(&memory, 1);
    put(&memory, 0x5000, 1);
    memory.freeze().unwrap();
    check(&memory, 2);
    let then = memory.image.clone();
    put(&memory, 0x9000, 2);
    memory.freeze().unwrap();
    memory.rollback(&then).unwrap();
    check(&memory, 2);
    memory.trim().unwrap();
    check(&memory, 2);
}

#[test]
fn memory_file_cannot_be_made_executable_where_the_kernel_knows_of_that() {
    use std::os::unix::fs::PermissionsExt;
    let file = sys::memfd(c"test", 4096).unwrap();
    let executable = file.set_permissions(std::fs::Permissions::from_mode(0o700));
    assert_eq!(executable.is_err(), kernel_version() >= (6, 3));
    sys::seal(&file).unwrap();
}

fn kernel_version() -> (u32, u32) {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = text.split(['.', '-']).map_while(|part| part.parse().ok());
    (numbers.next().unwrap(), numbers.next().unwrap())
}
