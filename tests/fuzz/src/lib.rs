//! Acts of a hostile guest, agent, client or file: each a function of bytes.
//!
//! | file | what the bytes are |
//! | --- | --- |
//! | `transport.rs` | a sequence of register accesses, ring writes, kicks, resets and snapshots |
//! | `disk.rs` | a sequence of disk requests, checked against a model of the disk |
//! | `net.rs` | a sequence of frames and buffers on both ends of a network card, checked frame by frame |
//! | `ports.rs` | accesses to the devices that are not virtio |
//! | `archive.rs` | the entries of a tar archive that is unpacked into a folder |
//! | `pvmm::snapshot::testing` | a state file and a folder's manifest, and changes to good ones |
//! | `api.rs` | requests at the API socket, and their bodies |
//! | `kernel.rs` | a kernel image |
//! | `frames.rs` | the agent's protocol, as either end reads it |
//! | `reports.rs` | what an agent answers to each request, with extreme numbers |
//!
//! The same functions are fuzz targets (`cargo xtask fuzz`) and tests: a test runs the kept corpus
//! and a few thousand inputs that are the same every time. A panic is a finding, and so is a broken
//! promise.

// A target that cannot do its part has found something, and a panic is how it says so.
#![allow(clippy::unwrap_used)]

mod api;
mod archive;
mod disk;
mod frames;
mod input;
mod kernel;
mod net;
mod ports;
mod reports;
mod transport;

/// Tries one input; panics if a promise is broken.
pub type Target = fn(&[u8]);

/// Every target by name.
pub const TARGETS: [(&str, Target); 16] = [
    ("transport_rng", transport::rng),
    ("transport_block", transport::block),
    ("transport_net", transport::net),
    ("block", disk::requests),
    ("net", net::frames),
    ("vsock", pvmm_devices::virtio::vsock::testing::walk),
    ("mmds", pvmm_devices::virtio::net::mmds::testing::walk),
    ("ports", ports::accesses),
    ("agent_frames", frames::stream),
    ("agent_messages", frames::message),
    ("agent_reports", reports::answers),
    ("archive", archive::entries),
    ("snapshot", pvmm::snapshot::testing::walk),
    ("api_http", api::requests),
    ("api_json", api::body),
    ("kernel", kernel::image),
];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// The kept inputs of a target, and then some that look random and never change.
    fn run(name: &str, count: u64) {
        let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).unwrap();
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
        let kept = fs::read_dir(&corpus).unwrap_or_else(|e| panic!("{}: {e}", corpus.display()));
        for entry in kept {
            target(&fs::read(entry.unwrap().path()).unwrap());
        }
        for seed in 0..count {
            target(&random(seed));
        }
    }

    /// Bytes from xorshift; half of the inputs prefer small numbers, which are the more telling
    /// ones.
    fn random(seed: u64) -> Vec<u8> {
        let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let len = next() % 400;
        let small = next() & 1 == 0;
        let mut bytes = Vec::with_capacity(len as usize);
        for _ in 0..len {
            let byte = next();
            bytes.push(if small && byte & 3 != 0 {
                (byte >> 8) as u8 % 16
            } else {
                (byte >> 8) as u8
            });
        }
        bytes
    }

    macro_rules! tests {
        ($($name:ident $count:literal)+) => {
            $(
                #[test]
                fn $name() {
                    run(stringify!($name), $count);
                }
            )+

            #[test]
            fn every_target_is_tested() {
                assert_eq!(TARGETS.map(|(name, _)| name), [$(stringify!($name)),+]);
            }
        };
    }

    tests! {
        transport_rng 3000
        transport_block 2000
        transport_net 2000
        block 1500
        net 2000
        vsock 3000
        mmds 2000
        ports 3000
        agent_frames 5000
        agent_messages 10000
        agent_reports 2000
        archive 1000
        snapshot 2000
        api_http 5000
        api_json 10000
        kernel 2000
    }
}
