//! The tests that every virtio device must pass, whatever it is for.
//!
//! A device's `tests.rs` supplies a `Specimen` and calls `conformance::suite!(its_specimen)`.

use std::time::Duration;

use proptest::test_runner::{Config, TestRunner};
use vm_memory::{Bytes, GuestAddress};

use super::registry::DeviceState;
use super::testing::Buffer::{Readable, Writable};
use super::testing::{
    HOLE_END, HOLE_START, INDIRECT, MEMORY_END, MEMORY_START, MockDriver, NEXT, Racer, WRITE,
    memory, raw_descriptor,
};
use super::{DeviceThread, VirtioDevice};
use crate::lines;

/// A device for the suite to test.
pub trait Specimen {
    type Device: VirtioDevice + 'static;

    /// A queue whose requests the device serves as soon as it is kicked.
    const QUEUE: usize;

    /// Creates a device that no driver has used. The previous device is gone by then.
    fn fresh(&self) -> Self::Device;

    /// Creates a device with a saved state. The saved device is gone by then.
    fn restored(&self, state: &DeviceState) -> Self::Device;

    /// Makes the device do its work once, and fails the test if it does not.
    fn exercise(&self, driver: &mut MockDriver);
}

/// Runs the suite for a specimen, with one test for each requirement.
macro_rules! suite {
    ($specimen:expr) => {
        $crate::virtio::conformance::suite!(@tests $specimen;
            activated_device_works
            reset_device_works_again_from_scratch
            reset_while_requests_wait_touches_nothing
            quiet_device_leaves_guest_memory_alone_until_resumed
            saved_device_works_on_where_it_stopped
            saved_idle_device_can_be_activated
            rewound_device_works_on_where_it_was_saved
            saved_faulty_device_stays_faulty_until_reset
            device_activated_while_quiet_waits
            malformed_chain_asks_for_reset_and_only_that
            wrong_order_chain_is_refused_and_the_next_is_served
            descriptors_flipped_by_another_thread_do_no_harm
            random_rings_do_no_harm
            device_on_its_thread_stops_in_time
        );
    };
    (@tests $specimen:expr; $($test:ident)+) => {
        mod conforms {
            use super::*;
            $(
                #[test]
                fn $test() {
                    $crate::virtio::conformance::$test(&$specimen);
                }
            )+
        }
    };
}
pub(crate) use suite;

pub fn activated_device_works<S: Specimen>(specimen: &S) {
    let mut driver = MockDriver::ready(specimen.fresh());
    assert_eq!(driver.status(), 0xf);
    for _ in 0..1000 {
        specimen.exercise(&mut driver);
        driver.run();
        assert!(driver.is_kick_wanted(S::QUEUE), "would not hear of the next request");
    }
    assert_eq!(driver.transport.counters().faults, 0);
}

pub fn reset_device_works_again_from_scratch<S: Specimen>(specimen: &S) {
    let mut driver = MockDriver::new(specimen.fresh());
    for features in [driver.offered(), super::mmio::VERSION_1] {
        driver.start_with(features);
        specimen.exercise(&mut driver);
        driver.reset();
        assert_eq!((driver.status(), driver.transport.interrupt().status()), (0, 0));
    }
}

pub fn reset_while_requests_wait_touches_nothing<S: Specimen>(specimen: &S) {
    let mut driver = MockDriver::ready(specimen.fresh());
    driver.run();
    driver.offer(S::QUEUE, 0);
    driver.kick(S::QUEUE);
    driver.reset();
    let before = snapshot(&driver);
    driver.run();
    assert!(snapshot(&driver) == before);
    assert!(!driver.needs_reset());
}

pub fn quiet_device_leaves_guest_memory_alone_until_resumed<S: Specimen>(specimen: &S) {
    let mut driver = MockDriver::ready(specimen.fresh());
    driver.run();
    driver.devices.handle().quiesce_all().unwrap();
    // A malformed chain has a visible effect on any device.
    driver.descriptor(S::QUEUE, 0, 0, 1, 0, 0);
    driver.offer(S::QUEUE, 0);
    driver.kick(S::QUEUE);
    let before = snapshot(&driver);
    driver.devices.run(100);
    assert!(snapshot(&driver) == before && !driver.needs_reset());
    driver.devices.handle().resume_all().unwrap();
    driver.run();
    assert!(driver.needs_reset());
}

pub fn saved_device_works_on_where_it_stopped<S: Specimen>(specimen: &S) {
    let mut driver = MockDriver::ready(specimen.fresh());
    for _ in 0..3 {
        specimen.exercise(&mut driver);
        let suspended = driver.suspend();
        let state = suspended.state.clone();
        let device = specimen.restored(&state.device);
        driver = suspended.resume(device).unwrap();
        assert_eq!(driver.status(), 0xf);
    }
    specimen.exercise(&mut driver);
}

pub fn rewound_device_works_on_where_it_was_saved<S: Specimen>(specimen: &S) {
    let mut driver = MockDriver::ready(specimen.fresh());
    for _ in 0..3 {
        specimen.exercise(&mut driver);
        driver.devices.handle().quiesce_all().unwrap();
        let state = driver.transport.save().unwrap();
        driver.transport.rewind(&state).unwrap();
        assert_eq!(driver.transport.save().unwrap().queues, state.queues);
        driver.devices.handle().resume_all().unwrap();
        assert_eq!(driver.status(), 0xf);
    }
    specimen.exercise(&mut driver);
}

pub fn saved_idle_device_can_be_activated<S: Specimen>(specimen: &S) {
    let suspended = MockDriver::new(specimen.fresh()).suspend();
    let device = specimen.restored(&suspended.state.device);
    let mut driver = suspended.resume(device).unwrap();
    driver.start();
    specimen.exercise(&mut driver);
}

pub fn saved_faulty_device_stays_faulty_until_reset<S: Specimen>(specimen: &S) {
    let driver = MockDriver::ready(specimen.fresh());
    driver.run();
    driver.set_avail_index(S::QUEUE, 0x7fff);
    driver.kick(S::QUEUE);
    driver.run();
    let suspended = driver.suspend();
    let device = specimen.restored(&suspended.state.device);
    let mut driver = suspended.resume(device).unwrap();
    assert!(driver.needs_reset());
    driver.start();
    specimen.exercise(&mut driver);
}

pub fn device_activated_while_quiet_waits<S: Specimen>(specimen: &S) {
    let mut driver = MockDriver::new(specimen.fresh());
    driver.devices.handle().quiesce_all().unwrap();
    driver.start();
    let before = snapshot(&driver);
    driver.devices.run(100);
    assert!(snapshot(&driver) == before);
    driver.devices.handle().resume_all().unwrap();
    specimen.exercise(&mut driver);
}

/// Descriptors that no device can use: address, length, flags and successor.
const MALFORMED: [(u64, u32, u16, u16); 10] = [
    (0x2000, 16, NEXT, u16::MAX),
    (0x2000, 16, NEXT, 0),
    (0, 16, 0, 0),
    (HOLE_START - 8, 16, WRITE, 0),
    (MEMORY_END - 8, 16, 0, 0),
    (u64::MAX - 8, 16, WRITE, 0),
    (0x2000, 16, INDIRECT | NEXT, 1),
    (0x2000, 17, INDIRECT, 0),
    (0x2000, 0, INDIRECT, 0),
    (0x2000, !15, INDIRECT, 0),
];

pub fn malformed_chain_asks_for_reset_and_only_that<S: Specimen>(specimen: &S) {
    let mut driver = MockDriver::new(specimen.fresh());
    for (faults, (address, len, flags, next)) in (1..).zip(MALFORMED) {
        driver.start();
        driver.run();
        driver.descriptor(S::QUEUE, 0, address, len, flags, next);
        driver.offer(S::QUEUE, 0);
        driver.kick(S::QUEUE);
        driver.run();
        assert!(driver.needs_reset(), "{address:#x}+{len:#x} {flags} {next}");
        assert_eq!(driver.used(S::QUEUE), None);
        // Counted once, however often the guest kicks a queue that has stopped.
        driver.kick(S::QUEUE);
        driver.run();
        assert_eq!(driver.transport.counters().faults, faults);
    }
    driver.start();
    specimen.exercise(&mut driver);
}

pub fn wrong_order_chain_is_refused_and_the_next_is_served<S: Specimen>(specimen: &S) {
    let mut driver = MockDriver::ready(specimen.fresh());
    driver.run();
    let chain = driver.place(S::QUEUE, &[Writable(16), Readable(&[1; 16])]);
    driver.offer(S::QUEUE, chain.head);
    driver.kick(S::QUEUE);
    driver.run();
    assert_eq!(driver.used(S::QUEUE).unwrap().len, 0);
    assert_eq!(driver.transport.counters().refused, 1);
    assert_eq!(driver.contents(&chain)[0], [0; 16]);
    assert!(driver.take_interrupt());
    specimen.exercise(&mut driver);
}

pub fn descriptors_flipped_by_another_thread_do_no_harm<S: Specimen>(specimen: &S) {
    let mut driver = MockDriver::new(specimen.fresh());
    let table = driver.descriptor_table(S::QUEUE);
    let memory = driver.memory.clone();
    let good = raw_descriptor(0x2000, 16, NEXT, 1);
    let bad = raw_descriptor(HOLE_END - 1, u32::MAX, WRITE | NEXT, 2);
    let racer = Racer::spawn(move || {
        for index in 0..8 {
            memory.write_slice(&bad, GuestAddress(table.0 + 16 * index)).unwrap();
            memory.write_slice(&good, GuestAddress(table.0 + 16 * index)).unwrap();
        }
    });
    for _ in 0..200 {
        driver.start();
        (0..8).for_each(|head| driver.offer(S::QUEUE, head));
        driver.kick(S::QUEUE);
        driver.run();
    }
    drop(racer);
    driver.start();
    specimen.exercise(&mut driver);
}

/// Random actions of a guest on a queue: no panic, no endless work, and a reset always helps.
pub fn random_rings_do_no_harm<S: Specimen>(specimen: &S) {
    use proptest::prelude::*;
    let addresses = prop_oneof![
        MEMORY_START..MEMORY_START + 0x800,
        HOLE_START - 0x100..HOLE_END,
        Just(0x1_0000u64),
        any::<u64>(),
    ];
    let lengths = prop_oneof![0..64u32, Just(512u32), any::<u32>()];
    let descriptor = (0..8u16, addresses, lengths, 0..8u16, 0..10u16);
    let step = (prop::collection::vec(descriptor, 1..8), 0..10u16, any::<u16>(), 0..20u8);
    let steps = prop::collection::vec(step, 1..6);
    let mut runner = TestRunner::new(Config { cases: 64, ..Config::default() });
    // One device for all cases, with only resets in between, as in a guest.
    let driver = std::cell::RefCell::new(MockDriver::new(specimen.fresh()));
    runner
        .run(&steps, |steps| {
            let driver = &mut *driver.borrow_mut();
            driver.start();
            for (descriptors, head, index, choice) in steps {
                for (at, address, len, flags, next) in descriptors {
                    driver.descriptor(S::QUEUE, at, address, len, flags, next);
                }
                match choice {
                    0 => driver.set_avail_index(S::QUEUE, index),
                    1 => driver.reset(),
                    2 => driver.start(),
                    3 => driver.set_used_event(S::QUEUE, index),
                    _ => driver.offer(S::QUEUE, head),
                }
                driver.kick(S::QUEUE);
                driver.run();
            }
            Ok(())
        })
        .unwrap();
    let driver = &mut *driver.borrow_mut();
    driver.start();
    specimen.exercise(driver);
}

pub fn device_on_its_thread_stops_in_time<S: Specimen>(specimen: &S) {
    let mut thread = DeviceThread::new().unwrap();
    thread.start().unwrap();
    let device = Box::new(specimen.fresh());
    let handle = thread.handle().clone();
    let (shortcut, (line, _)) = (Box::new(()), lines::testing::line());
    let transport =
        super::MmioTransport::new(device, memory(), handle.clone(), shortcut, line).unwrap();
    let start = std::time::Instant::now();
    handle.quiesce_all().unwrap();
    assert_eq!(transport.save().unwrap().kind, transport.kind());
    handle.resume_all().unwrap();
    thread.stop().unwrap();
    assert!(matches!(handle.quiesce_all(), Err(super::DeviceError::Gone)));
    assert!(start.elapsed() < Duration::from_secs(10));
}

/// Copies all guest memory that a device could have touched.
fn snapshot(driver: &MockDriver) -> Vec<u8> {
    let mut bytes = vec![0; (HOLE_START - MEMORY_START) as usize];
    driver.memory.read_slice(&mut bytes, GuestAddress(MEMORY_START)).unwrap();
    bytes
}
