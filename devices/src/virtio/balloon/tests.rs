//! The balloon, driven by a mock driver whose memory is really released.

use std::sync::mpsc::{Receiver, sync_channel};

use vm_memory::{Bytes, GuestAddress};

use super::super::conformance::{self, Specimen};
use super::super::mmio::{VERSION_1, offset, status};
use super::super::registry::{DeviceState, DeviceUpdate};
use super::super::testing::Buffer::{Readable, Writable};
use super::super::testing::{HOLE_START, MockDriver};
use super::config::PAGE_SIZE;
use super::device::feature;
use super::pages::PAGES_MAX;
use super::{Balloon, BalloonConfig, BalloonError, BalloonStats, BalloonUpdate};

const INFLATE: usize = 0;
const DEFLATE: usize = 1;
const STATS: usize = 2;
const HINTING: usize = 3;
const REPORTING: usize = 4;
/// A page above the hole, where no ring or buffer is.
const FIRST: u32 = 0x400;

fn everything() -> Balloon {
    Balloon::new(BalloonConfig {
        limit_pages: 1000,
        target_pages: 0,
        deflate_on_oom: true,
        free_page_reporting: true,
        free_page_hinting: true,
    })
}

fn address(page: u32) -> GuestAddress {
    GuestAddress(u64::from(page) * PAGE_SIZE)
}

fn fill(driver: &MockDriver, pages: std::ops::Range<u32>) {
    for page in pages {
        driver.memory.write_slice(&[7; PAGE_SIZE as usize], address(page)).unwrap();
    }
}

/// Returns the pages that still hold what `fill` wrote.
fn kept(driver: &MockDriver, pages: std::ops::Range<u32>) -> Vec<u32> {
    let is_kept = |page: &u32| {
        let mut bytes = [0; PAGE_SIZE as usize];
        driver.memory.read_slice(&mut bytes, address(*page)).unwrap();
        let whole = bytes.iter().filter(|byte| **byte == 7).count();
        assert!(whole == 0 || whole == bytes.len(), "page {page:#x} is torn");
        whole > 0
    };
    pages.filter(is_kept).collect()
}

fn numbers(pages: &[u32]) -> Vec<u8> {
    pages.iter().flat_map(|page| page.to_le_bytes()).collect()
}

fn update(driver: &MockDriver, update: BalloonUpdate) {
    driver.transport.update(DeviceUpdate::Balloon(update)).unwrap();
}

/// Returns the words of the configuration space: target, actual, hinting command.
fn space(driver: &MockDriver) -> [u32; 3] {
    [0, 4, 8].map(|at| driver.read(offset::CONFIG + at))
}

struct Inflatable;

impl Specimen for Inflatable {
    type Device = Balloon;
    const QUEUE: usize = INFLATE;

    fn fresh(&self) -> Balloon {
        everything()
    }

    fn restored(&self, state: &DeviceState) -> Balloon {
        let DeviceState::Balloon(state) = state else { panic!("{state:?}") };
        Balloon::restore(state).unwrap()
    }

    fn exercise(&self, driver: &mut MockDriver) {
        fill(driver, FIRST..FIRST + 2);
        let (used, _) = driver.request(INFLATE, &[Readable(&numbers(&[FIRST]))]);
        assert_eq!(used.unwrap().len, 0);
        assert_eq!(kept(driver, FIRST..FIRST + 2), [FIRST + 1]);
        let (used, _) = driver.request(DEFLATE, &[Readable(&numbers(&[FIRST]))]);
        assert_eq!(used.unwrap().len, 0);
    }
}

conformance::suite!(Inflatable);

#[test]
fn inflate_releases_the_pages_it_names_and_no_others() {
    let mut driver = MockDriver::ready(everything());
    fill(&driver, FIRST..FIRST + 8);
    let list = numbers(&[FIRST + 5, FIRST + 1, FIRST + 2, FIRST + 1, FIRST + 3]);
    let (used, _) = driver.request(INFLATE, &[Readable(&list[..6]), Readable(&list[6..])]);
    assert_eq!(used.unwrap().len, 0);
    let left = [FIRST, FIRST + 4, FIRST + 6, FIRST + 7];
    assert_eq!(kept(&driver, FIRST..FIRST + 8), left);
    assert_eq!(driver.transport.counters().refused, 0);
}

#[test]
fn deflate_takes_back_what_inflate_gave() {
    let mut driver = MockDriver::ready(everything());
    driver.request(INFLATE, &[Readable(&numbers(&[FIRST, FIRST + 1, FIRST + 2]))]);
    driver.request(DEFLATE, &[Readable(&numbers(&[FIRST + 1]))]);
    let DeviceState::Balloon(state) = driver.suspend().state.device else { panic!() };
    assert_eq!(state.actual_pages, 2);
}

#[test]
fn features_follow_the_configuration() {
    let plain = BalloonConfig {
        limit_pages: 1000,
        target_pages: 0,
        deflate_on_oom: false,
        free_page_reporting: false,
        free_page_hinting: false,
    };
    let offered = |config| super::super::VirtioDevice::features(&Balloon::new(config));
    assert_eq!(offered(plain), feature::STATS);
    let with = |bit| feature::STATS | bit;
    let on_oom = BalloonConfig { deflate_on_oom: true, ..plain };
    assert_eq!(offered(on_oom), with(feature::DEFLATE_ON_OOM));
    let reporting = BalloonConfig { free_page_reporting: true, ..plain };
    assert_eq!(offered(reporting), with(feature::REPORTING));
    let hinting = BalloonConfig { free_page_hinting: true, ..plain };
    assert_eq!(offered(hinting), with(feature::HINTING));
}

#[test]
fn pages_that_are_not_memory_are_left_out_and_counted() {
    let mut driver = MockDriver::ready(everything());
    fill(&driver, FIRST..FIRST + 2);
    let hole = (HOLE_START / PAGE_SIZE) as u32;
    for (times, bad) in (1..).zip([0, hole, FIRST - 1, 0x800, u32::MAX, 1 << 31]) {
        let (used, _) = driver.request(INFLATE, &[Readable(&numbers(&[bad, FIRST, bad]))]);
        assert_eq!(used.unwrap().len, 0);
        assert_eq!(kept(&driver, FIRST..FIRST + 2), [FIRST + 1]);
        assert_eq!(driver.transport.counters().refused, times);
        fill(&driver, FIRST..FIRST + 1);
    }
    assert!(!driver.needs_reset());
}

#[test]
fn list_that_is_too_long_odd_or_empty_is_cut_and_counted() {
    let mut driver = MockDriver::ready(everything());
    fill(&driver, FIRST..FIRST + 2);
    let mut long = vec![FIRST; PAGES_MAX];
    long.push(FIRST + 1);
    driver.request(INFLATE, &[Readable(&numbers(&long))]);
    assert_eq!(kept(&driver, FIRST..FIRST + 2), [FIRST + 1]);
    driver.request(INFLATE, &[Readable(&numbers(&[FIRST + 1])[..3])]);
    driver.request(INFLATE, &[Writable(64)]);
    assert_eq!(kept(&driver, FIRST..FIRST + 2), [FIRST + 1]);
    assert_eq!((driver.transport.counters().refused, driver.needs_reset()), (3, false));
}

#[test]
fn actual_size_never_leaves_what_there_is() {
    let mut driver = MockDriver::ready(everything());
    let pages: Vec<u32> = (FIRST..0x800).collect();
    for _ in 0..5 {
        driver.request(INFLATE, &[Readable(&numbers(&pages))]);
    }
    let state = driver.suspend().state.device;
    let DeviceState::Balloon(state) = state else { panic!("{state:?}") };
    assert_eq!(u64::from(state.actual_pages), (0x80_0000 - 0x40_0000 + 0x1f_f000) / PAGE_SIZE);
    let mut driver = MockDriver::ready(everything());
    driver.request(DEFLATE, &[Readable(&numbers(&pages))]);
    let DeviceState::Balloon(state) = driver.suspend().state.device else { panic!() };
    assert_eq!(state.actual_pages, 0);
}

#[test]
fn target_set_by_the_host_reaches_the_driver_and_a_snapshot() {
    let mut driver = MockDriver::new(everything());
    update(&driver, BalloonUpdate::Target(5));
    assert_eq!(space(&driver)[0], 5);
    driver.start();
    driver.run();
    driver.take_interrupt();
    update(&driver, BalloonUpdate::Target(9));
    assert!(driver.take_interrupt());
    driver.request(INFLATE, &[Readable(&numbers(&[FIRST, FIRST + 1]))]);
    let too_much = DeviceUpdate::Balloon(BalloonUpdate::Target(1001));
    assert!(driver.transport.update(too_much).is_err());
    let suspended = driver.suspend();
    let device = Inflatable.restored(&suspended.state.device);
    let driver = suspended.resume(device).unwrap();
    assert_eq!(space(&driver), [9, 2, 0]);
}

fn entry(tag: u16, value: u64) -> Vec<u8> {
    [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat()
}

fn ask(driver: &MockDriver) -> Receiver<BalloonStats> {
    let (sender, answer) = sync_channel(1);
    update(driver, BalloonUpdate::Stats(sender));
    driver.run();
    answer
}

#[test]
fn stats_are_asked_for_by_giving_the_buffer_back() {
    let mut driver = MockDriver::ready(everything());
    update(&driver, BalloonUpdate::Target(3));
    driver.send(STATS, &[Readable(&entry(4, 1))]);
    driver.run();
    assert_eq!(driver.used(STATS), None);
    for (free, paused) in [(2, false), (3, true), (4, false)] {
        if paused {
            driver.devices.handle().quiesce_all().unwrap();
        }
        let answer = ask(&driver);
        if paused {
            assert_eq!(driver.used(STATS), None);
            driver.devices.handle().resume_all().unwrap();
            driver.run();
        }
        assert!(driver.used(STATS).is_some());
        assert!(answer.try_recv().is_err());
        let list = [entry(4, free), entry(999, 1), entry(5, 64), vec![1]].concat();
        driver.send(STATS, &[Readable(&list)]);
        driver.run();
        let stats = answer.try_recv().unwrap();
        assert_eq!((stats.free, stats.total, stats.available), (Some(free), Some(64), None));
        assert_eq!(stats.target_bytes, 3 * PAGE_SIZE);
    }
}

#[test]
fn stats_asked_for_before_there_is_a_buffer_come_later() {
    let mut driver = MockDriver::ready(everything());
    let answer = ask(&driver);
    driver.send(STATS, &[Readable(&entry(4, 1))]);
    driver.run();
    assert!(driver.used(STATS).is_some());
    driver.send(STATS, &[Readable(&entry(4, 2))]);
    driver.run();
    assert_eq!(answer.try_recv().unwrap().free, Some(2));
    // Buffers that were not requested are not used.
    (0..9).for_each(|_| drop(driver.send(STATS, &[Readable(&entry(4, 3))])));
    driver.run();
    assert_eq!(driver.used(STATS), None);
}

#[test]
fn stats_buffer_is_back_in_the_ring_for_a_snapshot() {
    let mut driver = MockDriver::ready(everything());
    driver.send(STATS, &[Readable(&entry(4, 1))]);
    driver.run();
    let suspended = driver.suspend();
    let device = Inflatable.restored(&suspended.state.device);
    let mut driver = suspended.resume(device).unwrap();
    driver.run();
    let answer = ask(&driver);
    assert!(driver.used(STATS).is_some());
    driver.send(STATS, &[Readable(&entry(4, 2))]);
    driver.run();
    assert_eq!(answer.try_recv().unwrap().free, Some(2));
}

/// Offers a writable range of guest memory, as drivers name free blocks.
fn offer_range(driver: &mut MockDriver, queue: usize, start: u64, len: u32) {
    let head = driver.place(queue, &[Writable(16)]).head;
    driver.descriptor(queue, head, start, len, super::super::testing::WRITE, 0);
    driver.offer(queue, head);
    driver.kick(queue);
    driver.run();
    assert_eq!(driver.used(queue).unwrap().len, 0);
}

#[test]
fn reported_blocks_are_released_up_to_their_whole_pages() {
    let mut driver = MockDriver::ready(everything());
    fill(&driver, FIRST..FIRST + 8);
    offer_range(&mut driver, REPORTING, address(FIRST + 1).0, 2 * PAGE_SIZE as u32);
    offer_range(&mut driver, REPORTING, address(FIRST + 4).0 + 1, 2 * PAGE_SIZE as u32);
    assert_eq!(kept(&driver, FIRST..FIRST + 8), [0, 3, 4, 6, 7].map(|page| FIRST + page));
    assert_eq!(driver.transport.counters().refused, 0);
    offer_range(&mut driver, REPORTING, address(FIRST + 6).0 + 1, 100);
    assert_eq!(kept(&driver, FIRST + 6..FIRST + 8).len(), 2);
    assert_eq!(driver.transport.counters().refused, 1);
    // Reported pages do not count as inflated.
    assert_eq!(space(&driver)[1], 0);
}

#[test]
fn hinting_releases_pages_from_command_to_stop() {
    let mut driver = MockDriver::ready(everything());
    for run in 2..5u32 {
        fill(&driver, FIRST..FIRST + 4);
        let (sender, answer) = sync_channel(1);
        update(&driver, BalloonUpdate::Hint(sender));
        assert!(driver.take_interrupt());
        assert_eq!(space(&driver)[2], run);
        // Pages outside a run, or of another run, are kept.
        offer_range(&mut driver, HINTING, address(FIRST).0, PAGE_SIZE as u32);
        driver.request(HINTING, &[Readable(&(run - 1).to_le_bytes())]);
        offer_range(&mut driver, HINTING, address(FIRST).0, PAGE_SIZE as u32);
        driver.request(HINTING, &[Readable(&run.to_le_bytes())]);
        offer_range(&mut driver, HINTING, address(FIRST + 1).0, 2 * PAGE_SIZE as u32);
        assert!(answer.try_recv().is_err());
        driver.request(HINTING, &[Readable(&0u32.to_le_bytes())]);
        assert_eq!(answer.try_recv(), Ok(2 * PAGE_SIZE));
        offer_range(&mut driver, HINTING, address(FIRST + 3).0, PAGE_SIZE as u32);
        assert_eq!(kept(&driver, FIRST..FIRST + 4), [FIRST, FIRST + 3]);
        update(&driver, BalloonUpdate::HintDone);
        assert_eq!(space(&driver)[2], 1);
    }
    assert!(!driver.needs_reset());
}

#[test]
fn hinting_ends_with_the_driver_that_was_asked() {
    let mut driver = MockDriver::ready(everything());
    let (sender, answer) = sync_channel(1);
    update(&driver, BalloonUpdate::Hint(sender));
    driver.reset();
    assert!(answer.recv().is_err());
    update(&driver, BalloonUpdate::HintDone);
    assert_eq!(space(&driver)[2], 1);
    driver.start();
    Inflatable.exercise(&mut driver);
}

#[test]
fn driver_without_a_feature_leaves_its_queue_out_and_moves_the_next_up() {
    let mut driver = MockDriver::new(everything());
    driver.negotiate(VERSION_1 | feature::STATS | feature::REPORTING);
    (0..4).for_each(|queue| driver.set_up_queue(queue, 64));
    driver.write(offset::STATUS, driver.status() | status::DRIVER_OK);
    fill(&driver, FIRST..FIRST + 2);
    offer_range(&mut driver, 3, address(FIRST).0, PAGE_SIZE as u32);
    assert_eq!(kept(&driver, FIRST..FIRST + 2), [FIRST + 1]);
    let (sender, _answer) = sync_channel(1);
    let asked = driver.transport.update(DeviceUpdate::Balloon(BalloonUpdate::Hint(sender)));
    assert!(asked.is_err());
    let suspended = driver.suspend();
    let device = Inflatable.restored(&suspended.state.device);
    let mut driver = suspended.resume(device).unwrap();
    Inflatable.exercise(&mut driver);
}

#[test]
fn b8_driver_that_leaves_a_needed_queue_out_is_told_to_reset() {
    for (features, queues) in [(0, 1), (feature::STATS, 2), (feature::REPORTING, 2)] {
        let mut driver = MockDriver::new(everything());
        driver.negotiate(VERSION_1 | features);
        (0..queues).for_each(|queue| driver.set_up_queue(queue, 64));
        driver.write(offset::STATUS, driver.status() | status::DRIVER_OK);
        assert!(driver.needs_reset(), "{features:#x}");
    }
}

#[test]
fn balloon_without_extras_has_three_queues_and_refuses_what_it_has_not() {
    let mut driver = MockDriver::ready(Balloon::new(BalloonConfig::default()));
    assert_eq!(driver.offered() & 0xff, feature::STATS);
    driver.write(offset::QUEUE_SELECT, 3);
    assert_eq!(driver.read(offset::QUEUE_SIZE_MAX), 0);
    Inflatable.exercise(&mut driver);
    let (sender, _answer) = sync_channel(1);
    let asked = driver.transport.update(DeviceUpdate::Balloon(BalloonUpdate::Hint(sender)));
    assert!(asked.is_err());
}

#[test]
fn restore_of_impossible_balloon_is_refused() {
    let mut state = Balloon::new(BalloonConfig::default()).state();
    state.hint_command = 7;
    assert_eq!(Balloon::restore(&state).unwrap_err(), BalloonError::Hinting);
    state = everything().state();
    state.target_pages = 1001;
    let refused = Balloon::restore(&state).unwrap_err();
    assert_eq!(refused, BalloonError::Target { target: 1001, limit: 1000 });
}

#[test]
fn page_of_a_shared_file_goes_from_the_file_too() {
    use std::os::unix::fs::MetadataExt;
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(8 * PAGE_SIZE).unwrap();
    let behind = vm_memory::FileOffset::new(file.try_clone().unwrap(), 0);
    let range = (GuestAddress(0), 8 * PAGE_SIZE as usize, Some(behind));
    let memory = crate::GuestMemory::from_ranges_with_files([range]).unwrap();
    memory.write_slice(&[7; 8 * PAGE_SIZE as usize], GuestAddress(0)).unwrap();
    super::sys::release(&memory, address(2), 3 * PAGE_SIZE).unwrap();
    assert_eq!(file.metadata().unwrap().blocks() * 512, 5 * PAGE_SIZE);
    let mut bytes = [7; 2];
    memory.read_slice(&mut bytes, GuestAddress(5 * PAGE_SIZE - 1)).unwrap();
    assert_eq!(bytes, [0, 7]);
}
