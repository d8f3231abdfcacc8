//! The `pvmm` command.
fn main() {}
