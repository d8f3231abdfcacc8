//! `cargo xtask`: the one tool behind every `make` target.
fn main() {}
