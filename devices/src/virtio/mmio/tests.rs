//! The transport as a hostile driver meets it, with the cases of the bad-input catalogue by their numbers.

use super::super::rng::Rng;
use super::super::testing::MockDriver;
use super::{offset, status};

fn new() -> MockDriver {
    MockDriver::new(Rng::default())
}

#[test]
fn read_of_identity_gives_magic_version_and_kind() {
    let driver = new();
    assert_eq!(driver.read(offset::MAGIC), 0x7472_6976);
    assert_eq!(driver.read(offset::VERSION), 2);
    assert_eq!(driver.read(offset::DEVICE_ID), 4);
}

#[test]
fn start_by_the_book_reaches_driver_ok() {
    let mut driver = new();
    driver.start();
    assert_eq!(driver.status(), 0xf);
    driver.reset();
    assert_eq!(driver.status(), 0);
    assert_eq!(driver.status() & status::NEEDS_RESET, 0);
}
