//! The device as guests and host clients see it: a mock driver on one side, real Unix sockets on the other.
//!
//! `guest.rs` is the fixture; the cases of the bad-input catalogue carry their numbers.

mod bad_clients;
mod bad_packets;
mod guest;
mod limits;
mod restore;
mod streams;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn mux_under_any_script_keeps_its_bounds_and_every_byte(script in proptest::collection::vec(any::<u8>(), 0..3000)) {
        super::testing::walk(&script);
    }
}
