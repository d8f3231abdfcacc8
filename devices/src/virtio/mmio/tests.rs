//! Registers as a hostile driver uses them: group B of the bad-input catalogue, by number, and H9.

use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::EventFd;

use super::super::registry::DeviceState;
use super::super::rng::{Rng, RngStateV1};
use super::super::testing::Buffer::Writable;
use super::super::testing::{MockDriver, Racer, memory};
use super::super::{DeviceKind, DeviceThread, MmioTransport, QueueConfig};
use super::{KickShortcut, RestoreError, TransportStateV1, offset, status};
use crate::bus::BusDevice;
use crate::lines;

const QUEUE_REGISTERS: [u64; 8] = [
    offset::QUEUE_SIZE,
    offset::QUEUE_READY,
    offset::QUEUE_DESC_LOW,
    offset::QUEUE_DESC_HIGH,
    offset::QUEUE_DRIVER_LOW,
    offset::QUEUE_DRIVER_HIGH,
    offset::QUEUE_DEVICE_LOW,
    offset::QUEUE_DEVICE_HIGH,
];

fn new() -> MockDriver {
    MockDriver::new(Rng::default())
}

fn ready() -> MockDriver {
    MockDriver::ready(Rng::default())
}

fn works(driver: &mut MockDriver) -> bool {
    driver.request(0, &[Writable(8)]).0.is_some_and(|used| used.len == 8)
}

#[test]
fn read_of_identity_gives_magic_version_and_kind() {
    let driver = new();
    assert_eq!(driver.read(offset::MAGIC), 0x7472_6976);
    assert_eq!(driver.read(offset::VERSION), 2);
    assert_eq!(driver.read(offset::DEVICE_ID), 4);
}

#[test]
fn start_by_the_book_reaches_driver_ok_and_reset_goes_back() {
    let mut driver = ready();
    assert_eq!(driver.status(), 0xf);
    assert!(works(&mut driver));
    driver.reset();
    assert_eq!(driver.status(), 0);
    driver.write(offset::QUEUE_SELECT, 0);
    assert_eq!(driver.read(offset::QUEUE_READY), 0);
}

#[test]
fn kick_of_the_descriptor_serves_the_queue_without_a_register_write() {
    let mut driver = ready();
    let chain = driver.place(0, &[Writable(8)]);
    driver.offer(0, chain.head);
    driver.transport.kick(0).write(1).unwrap();
    driver.run();
    assert_eq!(driver.used(0).unwrap().len, 8);
}

#[test]
fn queue_that_is_kicked_often_gets_a_shortcut_once() {
    struct Connected(Arc<Mutex<Vec<u32>>>);
    impl KickShortcut for Connected {
        fn connect(&self, queue: u32, _kick: &EventFd) -> io::Result<()> {
            self.0.lock().unwrap().push(queue);
            Err(ErrorKind::Unsupported.into())
        }
    }
    let connected = Arc::new(Mutex::new(Vec::new()));
    let shortcut = Box::new(Connected(connected.clone()));
    let mut driver = MockDriver::with_shortcut(Rng::default(), shortcut);
    driver.start();
    driver.run();
    // Kicks are not read but watched by their edges; this one is of the activation.
    assert_eq!(driver.transport.kick(0).read().unwrap(), 1);
    (0..8).for_each(|_| driver.kick(0));
    assert!(connected.lock().unwrap().is_empty());
    // A shortcut that failed is not tried again, and kicks still arrive.
    (0..100).for_each(|_| driver.kick(0));
    assert_eq!(*connected.lock().unwrap(), [0]);
    assert_eq!(driver.transport.kick(0).read().unwrap(), 108);
}

#[test]
fn new_configuration_changes_generation_and_interrupts() {
    let driver = ready();
    let before = driver.read(offset::CONFIG_GENERATION);
    driver.transport.set_config(vec![1, 2, 3, 4]);
    assert_ne!(driver.read(offset::CONFIG_GENERATION), before);
    assert_eq!(driver.read(offset::CONFIG), 0x0403_0201);
    assert_eq!(driver.read(offset::INTERRUPT_STATUS), 2);
    assert!(driver.take_interrupt());
    assert_eq!(driver.read(offset::INTERRUPT_STATUS), 0);
}

#[test]
fn b1_access_of_other_sizes_or_misaligned_reads_zero_and_is_ignored() {
    let driver = new();
    for len in [0, 1, 2, 3, 8, 16] {
        let mut data = vec![0xee; len];
        BusDevice::read(&*driver.transport, offset::MAGIC, &mut data);
        assert_eq!(data, vec![0; len]);
        BusDevice::write(&*driver.transport, offset::STATUS, &vec![1; len]);
    }
    for misaligned in [1, 2, 3, offset::STATUS + 1, offset::SHM_LEN_LOW + 2] {
        assert_eq!(driver.read(misaligned), 0);
        driver.write(misaligned, 1);
    }
    assert_eq!(driver.status(), 0);
}

#[test]
fn b2_configuration_beyond_its_end_reads_zero_and_is_never_written() {
    let driver = new();
    driver.transport.set_config(vec![1, 2, 3, 4, 5]);
    for (at, expected) in [(4, 5), (5, 0), (0xefc, 0), (u64::MAX - offset::CONFIG - 3, 0)] {
        assert_eq!(driver.read(offset::CONFIG + at), expected);
    }
    let mut long = [0xee; 16];
    BusDevice::read(&*driver.transport, offset::CONFIG + 3, &mut long);
    assert_eq!(long, [4, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    driver.write(offset::CONFIG, u32::MAX);
    driver.write(u64::MAX, u32::MAX);
    assert_eq!(driver.read(offset::CONFIG), 0x0403_0201);
}

#[test]
fn b3_queue_that_does_not_exist_reads_zero_and_ignores_writes() {
    let mut driver = new();
    driver.negotiate(driver.offered());
    for queue in [1, 2, 0x1_0000, u32::MAX] {
        driver.write(offset::QUEUE_SELECT, queue);
        assert_eq!(driver.read(offset::QUEUE_SIZE_MAX), 0);
        QUEUE_REGISTERS.iter().for_each(|register| driver.write(*register, 1));
        assert_eq!(driver.read(offset::QUEUE_READY), 0);
    }
    driver.set_up_queues();
    driver.write(offset::STATUS, 0xf);
    assert!(works(&mut driver));
}

#[test]
fn b4_queue_size_of_zero_or_odd_or_too_large_is_refused() {
    for size in [0, 3, 255, 257, 512, 0x1_0000, 0x1_0100, u32::MAX] {
        let mut driver = new();
        driver.negotiate(driver.offered());
        driver.set_up_queue(0, 256);
        driver.write(offset::QUEUE_READY, 0);
        driver.write(offset::QUEUE_SIZE, size);
        driver.write(offset::QUEUE_READY, 1);
        driver.write(offset::STATUS, 0xf);
        // The size that was set before still holds.
        assert!(works(&mut driver), "{size}");
        // If none was set before, the device does not start.
        driver.negotiate(driver.offered());
        driver.write(offset::QUEUE_SELECT, 0);
        driver.write(offset::QUEUE_SIZE, size);
        driver.write(offset::QUEUE_READY, 1);
        driver.write(offset::STATUS, 0xf);
        assert!(driver.needs_reset(), "{size}");
    }
}

#[test]
fn b5_queue_registers_are_frozen_while_the_driver_runs() {
    let mut driver = ready();
    driver.write(offset::QUEUE_SELECT, 0);
    for register in QUEUE_REGISTERS {
        for value in [1, 2, 0x8000, u32::MAX, 0] {
            driver.write(register, value);
            assert_eq!(driver.read(offset::QUEUE_READY), 1);
        }
    }
    assert!(works(&mut driver));
    let state = driver.suspend().state;
    assert_eq!((state.queues[0].size, state.queues[0].ready), (256, true));
}

/// Returns a driver that has reached this status correctly.
fn at(step: u32) -> MockDriver {
    let mut driver = new();
    match step {
        0xb | 0xf => {
            driver.negotiate(driver.offered());
            driver.set_up_queues();
        }
        _ => driver.write(offset::STATUS, step),
    }
    driver.write(offset::STATUS, step);
    assert_eq!(driver.status(), step);
    driver
}

#[test]
fn b6_skipped_step_or_cleared_bit_fails_the_device_until_reset() {
    // Two steps at once are valid where nothing is negotiated in between.
    let allowed: [(u32, &[u32]); 4] =
        [(1, &[1, 3]), (3, &[3, 0xb]), (0xb, &[0xb, 0xf]), (0xf, &[0xf])];
    for (step, next) in allowed {
        for value in 1..=0x3f {
            let mut driver = at(step);
            driver.write(offset::STATUS, value);
            let failed = driver.status() & status::FAILED != 0;
            assert_eq!(failed, !next.contains(&value), "{value:#x} after {step:#x}");
            if failed {
                driver.write(offset::STATUS, 0xf);
                assert_eq!(driver.status(), step | status::FAILED);
                driver.start();
                assert!(works(&mut driver));
            }
        }
    }
}

#[test]
fn b6_first_step_other_than_acknowledge_fails_the_device() {
    for value in (2..=0xff).filter(|value| *value != 3 && value & !(1 | 3 | 0xc0) != 0) {
        let driver = new();
        driver.write(offset::STATUS, value);
        assert_eq!(driver.status(), status::FAILED, "{value:#x}");
    }
}

#[test]
fn b7_features_that_were_not_offered_or_without_version_1_are_refused() {
    let driver = new();
    let offered = driver.offered();
    for features in [1, offered | 1 << 5, offered | 1 << 40, u64::MAX, 0, offered & !(1 << 32)] {
        driver.negotiate(features);
        assert_eq!(driver.status(), 3, "{features:#x}");
        driver.write(offset::STATUS, 0xf);
        assert_eq!(driver.status() & status::DRIVER_OK, 0);
    }
    // The third page has no features at all.
    driver.negotiate(0);
    driver.write(offset::DRIVER_FEATURES_SELECT, 2);
    driver.write(offset::DRIVER_FEATURES, 1);
    driver.write(offset::STATUS, 0xb);
    assert_eq!(driver.status(), 3);
    driver.write(offset::DEVICE_FEATURES_SELECT, u32::MAX);
    assert_eq!(driver.read(offset::DEVICE_FEATURES), 0);
}

#[test]
fn b7_features_cannot_change_once_they_are_accepted() {
    let driver = ready();
    driver.write(offset::DRIVER_FEATURES_SELECT, 0);
    driver.write(offset::DRIVER_FEATURES, 0);
    let offered = driver.offered();
    assert_eq!(driver.suspend().state.driver_features, offered);
}

#[test]
fn b8_driver_ok_without_ready_queues_asks_for_reset() {
    let mut driver = new();
    driver.negotiate(driver.offered());
    driver.write(offset::STATUS, 0xf);
    assert!(driver.needs_reset());
    assert_eq!(driver.transport.counters().faults, 1);
    assert!(driver.take_interrupt());
    driver.start();
    assert!(works(&mut driver));
}

#[test]
fn b9_kick_of_a_queue_that_does_not_exist_or_does_not_run_is_ignored() {
    let mut driver = new();
    driver.kick(0);
    assert!(driver.transport.kick(0).read().is_err());
    driver.start();
    driver.run();
    assert_eq!(driver.transport.kick(0).read().unwrap(), 1);
    for queue in [1, 0x100, u32::MAX] {
        driver.write(offset::QUEUE_NOTIFY, queue);
    }
    assert!(driver.transport.kick(0).read().is_err());
}

#[test]
fn b10_reset_loop_leaves_no_descriptor_behind() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut driver = ready();
    let before = open();
    (0..100_000).for_each(|_| driver.reset());
    (0..2_000).for_each(|_| driver.start());
    // Other tests run at the same time; a leak would be thousands.
    assert!(open() < before + 1_000);
    assert!(works(&mut driver));
}

#[test]
fn b11_vcpus_that_fight_over_a_device_neither_deadlock_nor_break_it() {
    let mut thread = DeviceThread::new().unwrap();
    thread.start().unwrap();
    let handle = thread.handle().clone();
    let device = Box::new(Rng::default());
    let (shortcut, (line, _)) = (Box::new(()), lines::testing::line());
    let transport = MmioTransport::new(device, memory(), handle.clone(), shortcut, line);
    let transport = Arc::new(transport.unwrap());
    let start = Instant::now();
    let racers = [1, 2, 3].map(|mut seed| {
        let transport = transport.clone();
        Racer::spawn(move || fight(&transport, &mut seed))
    });
    for _ in 0..200 {
        handle.quiesce_all().unwrap();
        handle.resume_all().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(racers);
    assert!(start.elapsed() < Duration::from_secs(30));
    BusDevice::write(&*transport, offset::STATUS, &0u32.to_le_bytes());
    let mut data = [0xff; 4];
    BusDevice::read(&*transport, offset::STATUS, &mut data);
    assert_eq!(data, [0; 4]);
    handle.quiesce_all().unwrap();
    assert_eq!(transport.save().unwrap().status, 0);
}

/// Writes registers in start-up order, with some writes left out or out of order.
fn fight(transport: &MmioTransport, seed: &mut u32) {
    let steps: [(u64, u32); 16] = [
        (offset::STATUS, 0),
        (offset::STATUS, 1),
        (offset::STATUS, 3),
        (offset::DRIVER_FEATURES_SELECT, 1),
        (offset::DRIVER_FEATURES, 1),
        (offset::STATUS, 0xb),
        (offset::QUEUE_SELECT, 0),
        (offset::QUEUE_SIZE, 4),
        (offset::QUEUE_DESC_LOW, 0x1_0000),
        (offset::QUEUE_DRIVER_LOW, 0x2_0000),
        (offset::QUEUE_DEVICE_LOW, 0x3_0000),
        (offset::QUEUE_READY, 1),
        (offset::STATUS, 0xf),
        (offset::QUEUE_NOTIFY, 0),
        (offset::QUEUE_NOTIFY, 0),
        (offset::STATUS, 0),
    ];
    for (register, value) in steps {
        *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        if *seed >> 28 != 0 {
            BusDevice::write(transport, register, &value.to_le_bytes());
        }
    }
}

fn saved(status: u32, queue: QueueConfig) -> TransportStateV1 {
    TransportStateV1 {
        kind: DeviceKind::Rng,
        status,
        device_features_select: 0,
        driver_features_select: 0,
        driver_features: 1 << 32,
        queue_select: 0,
        config_generation: 0,
        interrupt_status: 0,
        needs_reset: false,
        queues: vec![queue],
        device: DeviceState::Rng(RngStateV1 {}),
    }
}

/// Returns a valid queue.
fn good() -> QueueConfig {
    QueueConfig {
        size: 256,
        ready: true,
        desc_table: 0x1_0000,
        avail_ring: 0x2_0000,
        used_ring: 0x3_0000,
        next_avail: 5,
        next_used: 5,
    }
}

fn restore(state: &TransportStateV1) -> Result<(), RestoreError> {
    let driver = new();
    let result = driver.transport.restore(state);
    // A refused state changes nothing.
    assert!(result.is_ok() || driver.status() == 0);
    result
}

#[test]
fn h9_state_in_good_order_is_accepted() {
    restore(&saved(0xf, good())).unwrap();
    restore(&saved(0xb, QueueConfig { next_avail: 0, next_used: 0, ..good() })).unwrap();
    restore(&saved(0, QueueConfig::default())).unwrap();
}

#[test]
fn h9_status_that_no_driver_can_reach_is_refused() {
    for status in [2, 4, 6, 7, 8, 0xd, 0x10, 0x1f, 0x4f, 0x100, u32::MAX] {
        let result = restore(&saved(status, good()));
        assert!(matches!(result, Err(RestoreError::Status { .. })), "{status:#x}");
    }
}

#[test]
fn h9_queues_that_run_without_driver_ok_are_refused() {
    let early =
        |status| matches!(restore(&saved(status, good())), Err(RestoreError::QueueTooEarly { .. }));
    assert!(early(0) && early(1) && early(3) && early(0xb));
}

#[test]
fn h9_queue_that_no_driver_could_have_set_up_is_refused() {
    let bad = [
        QueueConfig { size: 0, next_used: 5, next_avail: 5, ..good() },
        QueueConfig { size: 3, ..good() },
        QueueConfig { size: 512, ..good() },
        QueueConfig { ready: false, ..good() },
        QueueConfig { desc_table: 8, ..good() },
        QueueConfig { used_ring: u64::MAX - 3, ..good() },
        QueueConfig { next_avail: 5 + 257, ..good() },
        QueueConfig { next_used: 6, ..good() },
    ];
    for queue in bad {
        assert!(restore(&saved(0xf, queue)).is_err(), "{queue:?}");
    }
    let none = TransportStateV1 { queues: Vec::new(), ..saved(0xf, good()) };
    assert!(matches!(restore(&none), Err(RestoreError::QueueCount { saved: 0, here: 1 })));
    let many = TransportStateV1 { queues: vec![good(); 9], ..saved(0xf, good()) };
    assert!(matches!(restore(&many), Err(RestoreError::QueueCount { saved: 9, here: 1 })));
}

#[test]
fn h9_features_not_offered_and_other_devices_are_refused() {
    let features = TransportStateV1 { driver_features: 1 << 32 | 1, ..saved(0xf, good()) };
    assert!(matches!(restore(&features), Err(RestoreError::Features { .. })));
    let legacy = TransportStateV1 { driver_features: 0, ..saved(0xf, good()) };
    assert!(matches!(restore(&legacy), Err(RestoreError::Features { .. })));
    let block = TransportStateV1 { kind: DeviceKind::Block, ..saved(0xf, good()) };
    assert!(matches!(restore(&block), Err(RestoreError::Kind { .. })));
}

#[test]
fn restore_onto_a_device_in_use_is_refused() {
    let result = ready().transport.restore(&saved(0xf, good()));
    assert!(matches!(result, Err(RestoreError::InUse)));
}

#[test]
fn restore_raises_a_pending_interrupt_again() {
    let driver = new();
    let state = TransportStateV1 { interrupt_status: 1, ..saved(0xf, good()) };
    driver.transport.restore(&state).unwrap();
    assert_eq!(driver.read(offset::INTERRUPT_STATUS), 1);
    assert!(driver.take_interrupt());
}

#[test]
fn rewound_device_without_work_gets_no_event() {
    let mut driver = ready();
    assert!(works(&mut driver));
    let devices = driver.devices.handle();
    devices.quiesce_all().unwrap();
    driver.transport.rewind(&driver.transport.save().unwrap()).unwrap();
    devices.resume_all().unwrap();
    assert_eq!(driver.devices.run(10), 0);
    assert!(works(&mut driver));
}

#[test]
fn save_while_the_devices_are_not_quiet_is_refused() {
    let driver = ready();
    assert!(driver.transport.save().is_err());
}
