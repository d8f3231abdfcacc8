//! What a snapshot keeps of a source of randomness: nothing, on purpose.
//!
//! Bytes that survived a snapshot would be the same in every fork of it.

use serde::{Deserialize, Serialize};

/// Says that there was one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngStateV1 {}
