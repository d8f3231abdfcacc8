//! The device as guests and host clients see it: a mock driver on one side, real Unix sockets on the other.
//!
//! `guest.rs` is the fixture; the cases of the bad-input catalogue carry their numbers.

mod bad_clients;
mod bad_packets;
mod guest;
mod limits;
mod restore;
mod streams;
