//! Rings as a hostile driver makes them: group A of the bad-input catalogue, by number.
//!
//! A9 and A18 need a device with requests of its own, and are among the tests of the disk.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemory as _, Permissions};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::chain::ChainFault;
use super::mmio::{offset, status};
use super::rng::Rng;
use super::testing::Buffer::{Readable, Writable};
use super::testing::{
    HOLE_END, HOLE_START, INDIRECT, MEMORY_END, MockDriver, NEXT, Racer, WRITE, memory,
    raw_descriptor,
};
use super::{Chain, QueueConfig, QueueFault, VirtQueue};
use crate::GuestMemory;

const TABLE: u64 = 0x1_0000;
const AVAIL: u64 = 0x2_0000;
const USED: u64 = 0x3_0000;
/// Guest memory without a ring.
const DATA: u64 = 0x4_0000;

fn config(size: u16) -> QueueConfig {
    let (desc_table, avail_ring, used_ring) = (TABLE, AVAIL, USED);
    let (ready, next_avail, next_used) = (true, 0, 0);
    QueueConfig { size, ready, desc_table, avail_ring, used_ring, next_avail, next_used }
}

fn queue(config: &QueueConfig, memory: &GuestMemory) -> Result<VirtQueue, QueueFault> {
    let kick = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    VirtQueue::new(config, 256, true, memory.clone(), kick)
}

/// Creates a ring of 256 entries that offers these heads.
fn ring(heads: &[u16]) -> (VirtQueue, GuestMemory) {
    let memory = memory();
    for (index, head) in (0..).zip(heads) {
        memory.write_obj(*head, GuestAddress(AVAIL + 4 + 2 * index)).unwrap();
    }
    memory.write_obj(heads.len() as u16, GuestAddress(AVAIL + 2)).unwrap();
    (queue(&config(256), &memory).unwrap(), memory)
}

fn describe(memory: &GuestMemory, index: u16, raw: (u64, u32, u16, u16)) {
    let bytes = raw_descriptor(raw.0, raw.1, raw.2, raw.3);
    memory.write_slice(&bytes, GuestAddress(TABLE + 16 * u64::from(index))).unwrap();
}

/// Pops a chain that starts with the first of these descriptors.
fn pop_of(descriptors: &[(u64, u32, u16, u16)]) -> Result<Option<Chain>, QueueFault> {
    let (mut queue, memory) = ring(&[0]);
    (0..).zip(descriptors).for_each(|(index, raw)| describe(&memory, index, *raw));
    queue.pop()
}

fn chain_fault_of(descriptors: &[(u64, u32, u16, u16)]) -> ChainFault {
    match pop_of(descriptors) {
        Err(QueueFault::Chain(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

/// Starts a device, lets `act` be hostile, and checks that the device asks for one reset and works
/// after it.
fn assert_reset(act: impl FnOnce(&mut MockDriver)) {
    let mut driver = MockDriver::ready(Rng::default());
    driver.run();
    act(&mut driver);
    driver.kick(0);
    driver.run();
    assert!(driver.needs_reset());
    assert_eq!(driver.transport.counters().faults, 1);
    assert!(driver.take_interrupt());
    driver.start();
    assert_eq!(driver.request(0, &[Writable(8)]).0.unwrap().len, 8);
}

#[test]
fn a1_available_index_ahead_of_size_asks_for_reset() {
    assert_reset(|driver| driver.set_avail_index(0, 257));
    assert_reset(|driver| driver.set_avail_index(0, u16::MAX));
}

#[test]
fn a2_head_outside_the_table_asks_for_reset() {
    assert_reset(|driver| driver.offer(0, 256));
    assert_reset(|driver| driver.offer(0, u16::MAX));
}

#[test]
fn a3_successor_outside_the_table_asks_for_reset() {
    let fault = chain_fault_of(&[(DATA, 8, NEXT, 256)]);
    assert_eq!(fault, ChainFault::Index { index: 256, size: 256 });
    assert_reset(|driver| {
        driver.descriptor(0, 0, DATA, 8, NEXT, 256);
        driver.offer(0, 0);
    });
}

#[test]
fn a4_loop_ends_after_as_many_steps_as_the_table_has() {
    assert_eq!(chain_fault_of(&[(DATA, 8, NEXT, 0)]), ChainFault::TooLong);
    assert_eq!(chain_fault_of(&[(DATA, 0, NEXT, 1), (DATA, 0, NEXT, 0)]), ChainFault::TooLong);
    assert_reset(|driver| {
        driver.descriptor(0, 0, DATA, 8, WRITE | NEXT, 0);
        driver.offer(0, 0);
    });
}

#[test]
fn a5_indirect_in_indirect_or_with_successor_or_bad_length_asks_for_reset() {
    let indirect =
        |len| matches!(chain_fault_of(&[(DATA, len, INDIRECT, 0)]), ChainFault::Indirect { .. });
    assert!(indirect(0) && indirect(8) && indirect(17) && indirect(u32::MAX));
    let followed = chain_fault_of(&[(DATA, 16, INDIRECT | NEXT, 1)]);
    assert_eq!(followed, ChainFault::Indirect { len: 16 });
    // The table that the descriptor points to is the queue's own, so it nests.
    let nested = chain_fault_of(&[(TABLE, 32, INDIRECT, 0)]);
    assert_eq!(nested, ChainFault::Indirect { len: 32 });
    assert_reset(|driver| {
        driver.descriptor(0, 0, driver.descriptor_table(0).0, 16, INDIRECT, 0);
        driver.offer(0, 0);
    });
}

#[test]
fn a6_indirect_table_beyond_the_cap_asks_for_reset() {
    let fault = chain_fault_of(&[(DATA, 16 * 1025, INDIRECT, 0)]);
    assert_eq!(fault, ChainFault::Indirect { len: 16 * 1025 });
    assert_reset(|driver| {
        driver.descriptor(0, 0, DATA, 16 * 1025, INDIRECT, 0);
        driver.offer(0, 0);
    });
}

#[test]
fn indirect_table_within_the_cap_is_followed_after_direct_descriptors() {
    let (mut queue, memory) = ring(&[0]);
    describe(&memory, 0, (DATA, 8, NEXT, 1));
    describe(&memory, 1, (DATA + 0x1000, 16 * 1000, INDIRECT, 0));
    for index in 0..1000 {
        let next = if index < 999 { NEXT } else { 0 };
        let raw = raw_descriptor(DATA, 8, WRITE | next, index as u16 + 1);
        memory.write_slice(&raw, GuestAddress(DATA + 0x1000 + 16 * index)).unwrap();
    }
    let chain = queue.pop().unwrap().unwrap();
    assert_eq!((chain.readable().len(), chain.writable().len()), (1, 1000));
}

#[test]
fn a7_address_that_overflows_asks_for_reset() {
    for (address, len) in
        [(u64::MAX, 1), (u64::MAX, u32::MAX), (u64::MAX - 7, 8), (u64::MAX - 7, 9)]
    {
        let fault = chain_fault_of(&[(address, len, WRITE, 0)]);
        assert_eq!(fault, ChainFault::Buffer { address, len });
    }
    assert_reset(|driver| {
        driver.descriptor(0, 0, u64::MAX - 8, 16, WRITE, 0);
        driver.offer(0, 0);
    });
}

#[test]
fn a8_buffer_across_a_hole_or_past_the_end_asks_for_reset() {
    let outside = [
        (HOLE_START - 1, 2),
        (HOLE_START, 1),
        (HOLE_END - 1, 2),
        (MEMORY_END - 1, 2),
        (HOLE_START - 8, 0x40_0000),
    ];
    for (address, len) in outside {
        let fault = chain_fault_of(&[(address, len, WRITE, 0)]);
        assert_eq!(fault, ChainFault::Buffer { address, len });
    }
    assert!(pop_of(&[(HOLE_START - 1, 1, 0, 0)]).unwrap().is_some());
    assert_reset(|driver| {
        driver.descriptor(0, 0, HOLE_START - 1, 2, WRITE, 0);
        driver.offer(0, 0);
    });
}

#[test]
fn a10_writable_before_readable_is_a_request_error_and_the_ring_goes_on() {
    let mut driver = MockDriver::ready(Rng::default());
    let bad = driver.place(0, &[Writable(8), Readable(&[1; 8])]);
    let good = driver.place(0, &[Readable(&[1; 8]), Writable(8)]);
    for chain in [&bad, &good, &bad] {
        driver.offer(0, chain.head);
    }
    driver.kick(0);
    driver.run();
    let used: Vec<_> = std::iter::from_fn(|| driver.used(0)).map(|used| used.len).collect();
    assert_eq!(used, [0, 8, 0]);
    assert_eq!(driver.contents(&bad)[0], [0; 8]);
    assert_eq!(driver.transport.counters().refused, 2);
    assert!(!driver.needs_reset() && driver.take_interrupt());
}

#[test]
fn a11_descriptor_rewritten_after_it_was_latched_has_no_effect() {
    let (mut queue, memory) = ring(&[0]);
    describe(&memory, 0, (DATA, 8, WRITE, 0));
    let chain = queue.pop().unwrap().unwrap();
    describe(&memory, 0, (u64::MAX, u32::MAX, NEXT, 9));
    assert_eq!(chain.readable(), []);
    assert_eq!((chain.writable()[0].address.0, chain.writable()[0].len), (DATA, 8));
}

#[test]
fn a11_descriptor_flipped_by_a_second_thread_is_checked_as_it_was_latched() {
    let (_, memory) = ring(&[0]);
    describe(&memory, 0, (DATA, 0x1000, WRITE, 0));
    let theirs = memory.clone();
    let _racer = Racer::spawn(move || {
        describe(&theirs, 0, (DATA, 0x1000, WRITE, 0));
        describe(&theirs, 0, (MEMORY_END - 8, 0x1000, WRITE, 0));
    });
    let mut popped = 0;
    for _ in 0..20_000 {
        let Ok(Some(chain)) = queue(&config(256), &memory).unwrap().pop() else { continue };
        let segment = chain.writable()[0];
        assert!(memory.check_range(segment.address, segment.len as usize, Permissions::ReadWrite));
        popped += 1;
    }
    assert!(popped > 0);
}

#[test]
fn a12_head_offered_again_while_in_flight_asks_for_reset() {
    let (mut queue, memory) = ring(&[3, 4, 3]);
    (3..5).for_each(|index| describe(&memory, index, (DATA, 8, WRITE, 0)));
    let first = queue.pop().unwrap().unwrap();
    queue.pop().unwrap().unwrap();
    assert_eq!(queue.in_flight(), 2);
    assert!(matches!(queue.pop(), Err(QueueFault::Duplicate { head: 3 })));
    assert_eq!(first.head(), 3);
}

#[test]
fn a12_malformed_head_offered_again_while_in_flight_is_still_a_duplicate() {
    let (mut queue, memory) = ring(&[3, 3]);
    describe(&memory, 3, (DATA, 8, WRITE, 0));
    queue.pop().unwrap().unwrap();
    // Rewritten into a chain that is returned at once, which would return the head while it is in
    // flight.
    describe(&memory, 3, (DATA, 8, WRITE | NEXT, 4));
    describe(&memory, 4, (DATA, 8, 0, 0));
    assert!(matches!(queue.pop(), Err(QueueFault::Duplicate { head: 3 })));
}

#[test]
fn a12_head_offered_again_after_it_was_returned_is_fine() {
    let (mut queue, memory) = ring(&[3, 3]);
    describe(&memory, 3, (DATA, 8, WRITE, 0));
    let chain = queue.pop().unwrap().unwrap();
    queue.push(chain.head(), 8).unwrap();
    assert_eq!(queue.pop().unwrap().unwrap().head(), 3);
}

/// Creates a device with its rings at these addresses.
fn with_rings(desc: u64, avail: u64, used: u64) -> MockDriver {
    let driver = MockDriver::new(Rng::default());
    driver.negotiate(driver.offered());
    driver.write(offset::QUEUE_SELECT, 0);
    driver.write(offset::QUEUE_SIZE, 256);
    let registers = [
        (offset::QUEUE_DESC_LOW, desc),
        (offset::QUEUE_DRIVER_LOW, avail),
        (offset::QUEUE_DEVICE_LOW, used),
    ];
    for (register, address) in registers {
        driver.write(register, address as u32);
        driver.write(register + 4, (address >> 32) as u32);
    }
    driver.write(offset::QUEUE_READY, 1);
    driver.write(offset::STATUS, driver.status() | status::DRIVER_OK);
    driver
}

#[test]
fn a13_rings_on_top_of_each_other_and_of_buffers_end_in_bounded_work() {
    for (desc, avail, used) in
        [(DATA, DATA, DATA), (DATA, DATA + 0x100, DATA + 4), (DATA, DATA + 2, DATA + 0x10)]
    {
        for fill in [0u8, 1, 2, 3, 0x10, 0xff] {
            let driver = with_rings(desc, avail, used);
            driver.memory.write_slice(&[fill; 0x2000], GuestAddress(DATA)).unwrap();
            // A chain whose buffer is the ring that describes it.
            let raw = raw_descriptor(DATA, 0x1000, WRITE, 0);
            driver.memory.write_slice(&raw, GuestAddress(DATA + 16)).unwrap();
            (0..100).for_each(|_| driver.kick(0));
            assert!(driver.devices.run(100_000) < 100_000);
        }
    }
}

#[test]
fn a14_ring_unaligned_or_outside_memory_is_refused() {
    let bad =
        [0, DATA + 1, HOLE_START, HOLE_END - 16, HOLE_START - 16, MEMORY_END, 0xd000_0000, !15];
    for address in bad {
        assert!(with_rings(address, AVAIL, USED).needs_reset(), "{address:#x}");
        assert!(with_rings(TABLE, address, USED).needs_reset(), "{address:#x}");
        assert!(with_rings(TABLE, AVAIL, address).needs_reset(), "{address:#x}");
    }
    assert!(with_rings(DATA + 8, AVAIL, USED).needs_reset());
    assert!(with_rings(TABLE, AVAIL, DATA + 2).needs_reset());
    assert!(!with_rings(TABLE, AVAIL, USED).needs_reset());
}

#[test]
fn a15_used_ring_that_is_not_all_memory_is_refused() {
    // All but the last byte of it is in memory: 256 entries, flags, index and event index.
    let driver = with_rings(TABLE, AVAIL, HOLE_START - (6 + 8 * 256) + 2);
    assert!(driver.needs_reset());
    let faults = driver.transport.counters().faults;
    driver.kick(0);
    driver.run();
    assert_eq!((faults, driver.transport.counters().faults), (1, 1));
}

#[test]
fn a16_nonsense_event_index_costs_interrupts_at_most() {
    let mut driver = MockDriver::ready(Rng::default());
    for event in (0..=u16::MAX).step_by(97) {
        driver.set_used_event(0, event);
        assert_eq!(driver.request(0, &[Writable(8)]).0.unwrap().len, 8);
    }
}

#[test]
fn a17_kick_storm_is_one_event_and_one_look_at_the_ring() {
    let driver = MockDriver::ready(Rng::default());
    driver.run();
    driver.take_interrupt();
    (0..200_000).for_each(|_| driver.kick(0));
    assert_eq!(driver.devices.run(100), 1);
    assert!(!driver.take_interrupt());
    assert_eq!(driver.transport.counters(), Default::default());
}

#[test]
fn interrupt_comes_once_per_batch_and_only_when_asked_for() {
    let mut driver = MockDriver::ready(Rng::default());
    driver.run();
    let chain = driver.place(0, &[Writable(8)]);
    // The driver wants an interrupt for the fourth entry; the device gets three.
    driver.set_used_event(0, 3);
    (0..3).for_each(|_| driver.offer(0, chain.head));
    driver.kick(0);
    driver.run();
    assert!(!driver.take_interrupt());
    driver.send(0, &[Writable(8)]);
    driver.run();
    assert!(driver.take_interrupt() && !driver.take_interrupt());
}

/// Returns what a queue at `next` must do with an avail index: the number of chains, or None for a
/// fault.
fn expected(size: u16, next: u16, index: u16) -> Option<u16> {
    let ahead = (i32::from(index) - i32::from(next)).rem_euclid(1 << 16) as u16;
    (ahead <= size).then_some(ahead)
}

#[test]
fn pop_for_every_index_of_small_queues_agrees_with_the_model() {
    let memory = memory();
    (0..4).for_each(|index| describe(&memory, index, (DATA, 8, WRITE, 0)));
    (0..4).for_each(|slot: u16| {
        let at = GuestAddress(AVAIL + 4 + 2 * u64::from(slot));
        memory.write_obj(slot, at).unwrap();
    });
    for size in [1, 2, 4] {
        for next in [0, 1, 2, 3, 0x7fff, 0x8000, 0xfffe, 0xffff] {
            let fresh = || {
                let config = QueueConfig { next_avail: next, next_used: next, ..config(size) };
                queue(&config, &memory).unwrap()
            };
            let mut queue = fresh();
            for index in 0..=u16::MAX {
                memory.write_obj(index, GuestAddress(AVAIL + 2)).unwrap();
                let Some(count) = expected(size, next, index) else {
                    assert!(queue.pop().is_err(), "size {size} next {next} index {index}");
                    continue;
                };
                let mut queue = fresh();
                for step in 0..count {
                    let head = queue.pop().unwrap().unwrap().head();
                    assert_eq!(head, next.wrapping_add(step) % size);
                }
                assert!(queue.pop().unwrap().is_none());
            }
        }
    }
}

#[test]
fn undone_pops_with_malformed_chains_between_lose_nothing_and_return_nothing_twice() {
    // Chains 0, 2 and 5 are valid; 1 and 3 are in the wrong order and are returned at once.
    let (mut queue, memory) = ring(&[0, 1, 2, 3, 5]);
    [0, 2, 5].iter().for_each(|head| describe(&memory, *head, (DATA, 8, WRITE, 0)));
    describe(&memory, 1, (DATA, 8, WRITE | NEXT, 4));
    describe(&memory, 3, (DATA, 8, WRITE | NEXT, 4));
    describe(&memory, 4, (DATA, 8, 0, 0));
    let used = || memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap();
    for _ in 0..3 {
        let mut popped: Vec<_> = std::iter::from_fn(|| queue.pop().unwrap()).collect();
        let heads: Vec<_> = popped.iter().map(Chain::head).collect();
        assert_eq!((heads, used()), (vec![0, 2, 5], 2));
        while let Some(chain) = popped.pop() {
            queue.undo_pop(chain);
        }
        assert_eq!((queue.in_flight(), queue.save().next_avail), (0, 0));
    }
    for head in [0, 2, 5] {
        assert_eq!(queue.pop().unwrap().unwrap().head(), head);
        queue.push(head, 0).unwrap();
    }
    assert_eq!((queue.pop().unwrap(), used()), (None, 5));
    // After the counter has wrapped, these positions are chains like any other.
    for round in 0..=u16::MAX {
        memory
            .write_obj(
                2u16,
                GuestAddress(AVAIL + 4 + 2 * u64::from(5u16.wrapping_add(round) % 256)),
            )
            .unwrap();
        memory.write_obj(6u16.wrapping_add(round), GuestAddress(AVAIL + 2)).unwrap();
        assert_eq!(queue.pop().unwrap().unwrap().head(), 2, "{round}");
        queue.push(2, 0).unwrap();
    }
}
