//! The guest agent, as the bytes of a static executable.
//!
//! A single `pvmm` file can start a guest because it has this in it. A crate of its own, so that
//! what only prepares kernels and templates does not wait for the agent to be built. The build
//! script builds the agent from the source of `pvmm-guest-agent`, unless the environment variable
//! `PVMM_AGENT_BIN` names an agent that is already built.

/// The agent that `build.rs` compiled; it becomes the guest's `/init`.
pub static AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pvmm-agent"));

/// Names the agent: another agent has another key.
pub const AGENT_KEY: &str = env!("PVMM_AGENT_KEY");

#[cfg(test)]
mod tests {
    use super::*;

    /// The program header type that asks for a dynamic loader.
    const PT_INTERP: u32 = 3;

    fn word(at: usize, len: usize) -> usize {
        AGENT[at..at + len].iter().rev().fold(0, |value, &byte| value << 8 | usize::from(byte))
    }

    #[test]
    fn agent_as_built_is_static_and_small() {
        assert_eq!(&AGENT[..4], b"\x7fELF");
        let (headers, size, count) = (word(0x20, 8), word(0x36, 2), word(0x38, 2));
        for n in 0..count {
            assert_ne!(word(headers + n * size, 4) as u32, PT_INTERP);
        }
        assert!(AGENT.len() < 2_000_000, "{} bytes", AGENT.len());
    }
}
