//! Tests of the codec, the windows and the tail ring.
//! Hostile bytes are the rule here: whatever comes, nothing panics and nothing grows.
