//! What KVM offers and how this crate talks to it; the one place with vendor quirks.

pub mod host;
