//! Updates of a disk while a guest uses it.

use super::super::super::registry::DeviceUpdate;
use super::super::super::{DeviceError, UpdateError};
use super::super::io::Changes;
use super::super::{BlockUpdate, EngineKind, Source};
use super::*;
use crate::rate_limiter::{BucketConfig, RateLimiterConfig};

fn update(driver: &MockDriver, update: BlockUpdate) -> Result<(), DeviceError> {
    driver.transport.update(DeviceUpdate::Block(update))
}

#[test]
fn resized_image_is_announced_and_its_new_end_counts() {
    let image = image();
    let mut driver = MockDriver::ready(disk(&image));
    let generation = driver.read(mmio::offset::CONFIG_GENERATION);
    image.as_file().set_len(128 * 512).unwrap();
    assert_eq!(read(&mut driver, 100, 512).0, IOERR);
    driver.take_interrupt();
    update(&driver, BlockUpdate::Resize).unwrap();
    assert_eq!(driver.read(mmio::offset::INTERRUPT_STATUS) & 2, 2);
    assert_eq!(driver.read(mmio::offset::CONFIG), 128);
    assert_ne!(driver.read(mmio::offset::CONFIG_GENERATION), generation);
    assert_eq!(read(&mut driver, 100, 512), (OK, vec![0; 512]));
    image.as_file().set_len(10 * 512).unwrap();
    update(&driver, BlockUpdate::Resize).unwrap();
    assert_eq!(write(&mut driver, 10, &[1; 512]), IOERR);
    assert_eq!(image.as_file().metadata().unwrap().len(), 10 * 512);
}

#[test]
fn writes_and_discards_are_noted_once_they_have_ended_until_nobody_asks() {
    for engine in [EngineKind::Plain, EngineKind::Auto] {
        let (image, changes) = (image(), Changes::default());
        image.as_file().set_len(1 << 20).unwrap();
        let block = Block::new(BlockConfig::new(image.path()).engine(engine)).unwrap();
        let mut driver = MockDriver::ready(block);
        let write = |driver: &mut MockDriver, sector: u64| {
            let sent =
                driver.send(0, &[Readable(&header(OUT, sector)), Readable(&[9; 512]), Writable(1)]);
            while driver.used(0).is_none() {
                driver.run();
            }
            assert_eq!(driver.contents(&sent)[2], [OK]);
        };
        write(&mut driver, 40);
        update(&driver, BlockUpdate::Note(Some(changes.clone()))).unwrap();
        write(&mut driver, 9);
        write(&mut driver, 17);
        let expected = 4096..3 * 4096;
        assert_eq!(changes.take(1 << 20), [expected]);
        assert!(changes.take(1 << 20).is_empty());
        write(&mut driver, 2047);
        assert_eq!(changes.take(1 << 19), []);
        update(&driver, BlockUpdate::Note(None)).unwrap();
        write(&mut driver, 9);
        assert!(changes.take(1 << 20).is_empty());
    }
}

#[test]
fn resize_of_a_disk_that_no_driver_uses_shows_at_its_next_start() {
    let image = image();
    let mut driver = MockDriver::new(disk(&image));
    image.as_file().set_len(99 * 512).unwrap();
    update(&driver, BlockUpdate::Resize).unwrap();
    driver.start();
    assert_eq!(driver.read(mmio::offset::CONFIG), 99);
    assert_eq!(read(&mut driver, 98, 512).0, OK);
}

#[test]
fn replaced_image_is_used_from_the_next_request_on() {
    for engine in [EngineKind::Plain, EngineKind::Auto] {
        let (first, second) = (image(), NamedTempFile::new().unwrap());
        second.as_file().set_len(8 * 512).unwrap();
        let block = Block::new(BlockConfig::new(first.path()).engine(engine)).unwrap();
        let handle = block.handle();
        let mut driver = MockDriver::ready(block);
        driver.run();
        let replacement = handle.open(Source::Path(second.path().into())).unwrap();
        update(&driver, replacement).unwrap();
        assert_eq!(driver.read(mmio::offset::CONFIG), 8);
        let sent = driver.send(0, &[Readable(&header(OUT, 3)), Readable(&[9; 512]), Writable(1)]);
        while driver.used(0).is_none() {
            driver.run();
        }
        assert_eq!(driver.contents(&sent)[2], [OK]);
        assert_eq!(fs::read(second.path()).unwrap()[3 * 512..4 * 512], [9; 512]);
        assert_eq!(fs::read(first.path()).unwrap()[3 * 512..4 * 512], [3; 512]);
        // The first image is unlocked, the second is locked.
        assert!(Block::new(BlockConfig::new(first.path())).is_ok());
        assert!(Block::new(BlockConfig::new(second.path())).is_err());
    }
}

#[test]
fn replacement_that_cannot_be_used_is_refused_and_changes_nothing() {
    let image = image();
    let block = disk(&image);
    let handle = block.handle();
    let mut driver = MockDriver::ready(block);
    for source in ["/none", "/dev/null", "/"] {
        assert!(handle.open(Source::Path(source.into())).is_err(), "{source}");
    }
    // The image itself is in use by this disk.
    assert!(handle.open(Source::Path(image.path().into())).is_err());
    assert_eq!(read(&mut driver, 1, 512), (OK, vec![1; 512]));
}

#[test]
fn lifted_limit_lets_waiting_requests_pass() {
    let image = image();
    let ops = BucketConfig { size: 1, one_time_burst: 0, refill_time_ms: 3_600_000 };
    let limits = RateLimiterConfig { bytes: None, ops: Some(ops) };
    let mut driver =
        MockDriver::ready(Block::new(BlockConfig::new(image.path()).limits(limits)).unwrap());
    driver.run();
    (0..5).for_each(|sector| {
        driver.send(0, &[Readable(&header(IN, sector)), Writable(512), Writable(1)]);
    });
    driver.run();
    assert_eq!(driver.used_index(0), 1);
    update(&driver, BlockUpdate::Limits(RateLimiterConfig::default())).unwrap();
    driver.run();
    assert_eq!(driver.used_index(0), 5);
}

#[test]
fn resize_that_the_host_cannot_measure_changes_nothing() {
    let host = Fragile::new(0);
    let mut driver = host.driver();
    host.fail_next(&[libc::EIO]);
    let error = update(&driver, BlockUpdate::Resize).unwrap_err();
    assert!(matches!(error, DeviceError::Update(UpdateError::Host { .. })), "{error:?}");
    assert_eq!(read(&mut driver, SECTORS - 1, 512).0, OK);
}

#[test]
fn setting_of_another_device_is_refused() {
    let driver = MockDriver::ready(super::super::super::rng::Rng::default());
    let error = update(&driver, BlockUpdate::Resize).unwrap_err();
    assert!(matches!(error, DeviceError::Update(UpdateError::NotOfThisDevice)), "{error:?}");
}
