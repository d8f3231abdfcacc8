//! The state that a snapshot keeps of a source of randomness: nothing, on purpose.
//!
//! Bytes kept in a snapshot would be equal in every fork of it.

use serde::{Deserialize, Serialize};

/// An empty state, which records that the device existed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngStateV1 {}
