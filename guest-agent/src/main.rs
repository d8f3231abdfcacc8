//! The agent that runs in the guest.
fn main() {}
