//! The device as guests and host clients see it: a mock driver on one side, real Unix sockets on
//! the other.
//!
//! `guest.rs` is the fixture; the cases of the bad-input catalogue carry their numbers.

mod bad_clients;
mod bad_packets;
mod credit_model;
mod guest;
mod limits;
mod restore;
mod streams;

use proptest::prelude::*;
use tempfile::TempDir;

use self::guest::{CID, EVENT, RX, TX, open};
use super::Vsock;
use super::wire::{HOST_CID, Header, Op, TYPE_STREAM};
use crate::virtio::conformance;
use crate::virtio::registry::DeviceState;
use crate::virtio::testing::Buffer::{Readable, Writable};
use crate::virtio::testing::MockDriver;

/// A device that refuses: it answers a request for an unserved port with a reset.
struct Unserved(TempDir);

impl conformance::Specimen for Unserved {
    type Device = Vsock;
    const QUEUE: usize = TX;

    fn fresh(&self) -> Vsock {
        open(&self.0, Default::default())
    }

    fn restored(&self, state: &DeviceState) -> Vsock {
        let DeviceState::Vsock(state) = state else { panic!("not a vsock state") };
        self.fresh().restore(state).unwrap()
    }

    fn exercise(&self, driver: &mut MockDriver) {
        let request = Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: 7000,
            dst_port: 99,
            kind: TYPE_STREAM,
            op: Op::Request as u16,
            ..Header::default()
        };
        let buffer = driver.send(RX, &[Writable(256)]);
        driver.send(TX, &[Readable(&request.encode())]);
        driver.run();
        assert_eq!(driver.used(TX).unwrap().len, 0);
        let used = driver.used(RX).or_else(|| {
            // A restored device first waits until its driver has dropped everything.
            (0..2).for_each(|_| {
                driver.send(EVENT, &[Writable(4)]);
                driver.run();
            });
            assert_eq!(driver.used(EVENT).unwrap().len, 4);
            driver.used(RX)
        });
        assert_eq!(used.unwrap().len, 44);
        let [raw] = &driver.contents(&buffer)[..] else { panic!("one buffer was sent") };
        assert_eq!(Header::decode(raw[..44].try_into().unwrap()).op, Op::Reset as u16);
    }
}

conformance::suite!(Unserved(tempfile::tempdir().unwrap()));

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn mux_under_any_script_keeps_its_bounds_and_every_byte(script in proptest::collection::vec(any::<u8>(), 0..3000)) {
        super::testing::walk(&script);
    }
}
