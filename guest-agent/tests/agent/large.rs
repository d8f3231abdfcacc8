//! A file of real data, in and out, with hashes that match and memory that stays flat.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::Hasher;
use std::io::{Read, Write};

use pvmm::agent::FileWriteOptions;

use crate::fixture::Fixture;

/// Numbers without a pattern that a filesystem could shorten.
struct Noise(u64);

impl Noise {
    fn fill(&mut self, block: &mut [u8]) {
        for word in block.chunks_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            word.copy_from_slice(&self.0.to_le_bytes()[..word.len()]);
        }
    }
}

fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// `alone`: no other test runs in this process, so that its memory can be judged too.
fn there_and_back(mib: usize, alone: bool) {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let own = std::process::id();
    let mut block = vec![0; 1 << 20];
    agent.write_file(fixture.path("f"), &block, &FileWriteOptions::default()).unwrap();
    agent.read_file(fixture.path("f"), 2 << 20).unwrap();
    let before = (resident_kib(fixture.pid()), resident_kib(own));
    let mut most = before;
    let mut measure = || {
        most = (most.0.max(resident_kib(fixture.pid())), most.1.max(resident_kib(own)));
    };
    let (mut noise, mut sent, mut got) =
        (Noise(0x9e37_79b9_7f4a_7c15), DefaultHasher::new(), DefaultHasher::new());
    let mut writer = agent.open_write(fixture.path("f"), &FileWriteOptions::default()).unwrap();
    for number in 0..mib {
        noise.fill(&mut block);
        sent.write(&block);
        writer.write_all(&block).unwrap();
        if number % 64 == 0 {
            measure();
        }
    }
    assert_eq!(writer.finish().unwrap(), (mib as u64) << 20);
    let mut reader = agent.open_read(fixture.path("f"), None).unwrap();
    for number in 0..mib {
        reader.read_exact(&mut block).unwrap();
        got.write(&block);
        if number % 64 == 0 {
            measure();
        }
    }
    assert_eq!(reader.read(&mut block).unwrap(), 0);
    assert_eq!(sent.finish(), got.finish());
    let grown = (most.0 - before.0, most.1 - before.1);
    println!("{mib} MiB both ways: agent +{} KiB, this process +{} KiB", grown.0, grown.1);
    assert!(grown.0 <= 8 << 10, "{grown:?}");
    assert!(!alone || grown.1 <= 8 << 10, "{grown:?}");
}

#[test]
fn file_of_128_mib_of_real_data_matches_with_flat_memory() {
    there_and_back(128, false);
}

#[test]
#[ignore = "make soak; takes 2 GiB of disk and a minute"]
fn soak_file_of_2_gib_of_real_data_matches_with_flat_memory() {
    there_and_back(2048, true);
}
