//! Checks against known unsound crates: their versions in `Cargo.lock`, and uses in the sources
//! that repeat their fault.
//!
//! The list is part of this repository, so that `cargo xtask check` needs no network and no other
//! program.

/// A crate that guests or files can reach, the first version without the fault, and the published
/// advisory.
const FIXED: [(&str, [u64; 3], &str); 4] = [
    ("kvm-ioctls", [0, 19, 1], "RUSTSEC-2024-0428"),
    ("linux-loader", [0, 8, 1], "GHSA-52h2-m2cf-9jh6"),
    ("vm-memory", [0, 12, 2], "CVE-2023-41051"),
    ("vmm-sys-util", [0, 12, 0], "CVE-2023-50711"),
];

/// Crates that are no longer maintained, with the advisory.
const ABANDONED: [(&str, &str); 2] =
    [("bincode", "RUSTSEC-2025-0141"), ("versionize", "CVE-2023-28448")];

/// Returns the faults of the crates in a `Cargo.lock`.
pub fn in_lock(lock: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let value = |line: &str, key: &str| {
        Some(line.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"')?.to_owned())
    };
    let mut name = String::new();
    for line in lock.lines() {
        if let Some(found) = value(line, "name") {
            name = found;
        } else if let Some(version) = value(line, "version") {
            let numbers: Vec<u64> =
                version.split(['.', '-', '+']).map_while(|part| part.parse().ok()).collect();
            let unsound = |(krate, fixed, _): &&(&str, [u64; 3], &str)| {
                *krate == name && numbers.as_slice() < &fixed[..]
            };
            if let Some((_, _, published)) = FIXED.iter().find(unsound) {
                faults.push(format!("Cargo.lock: {name} {version} has {published}; update it"));
            }
            if let Some((_, why)) = ABANDONED.iter().find(|(krate, _)| *krate == name) {
                faults.push(format!("Cargo.lock: {name} is given up, see {why}; use another"));
            }
        }
    }
    faults
}

/// Returns the trait of guest memory that a source implements itself, if any. Only this project
/// would check the bounds of such memory.
pub fn in_source(text: &str) -> Option<&'static str> {
    let kinds = ["VolatileMemory", "GuestMemory", "GuestMemoryBackend", "GuestMemoryRegion"];
    let own = |line: &str, kind: &str| {
        line.starts_with("impl")
            && line.split_once(" for ").is_some_and(|(of, _)| {
                of.rsplit([' ', ':']).next().is_some_and(|name| name == kind)
            })
    };
    kinds.into_iter().find(|kind| text.lines().any(|line| own(line, kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(name: &str, version: &str) -> String {
        format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\nsource = \"x\"\n")
    }

    #[test]
    fn unsound_or_abandoned_crate_is_named() {
        for (name, version) in
            [("kvm-ioctls", "0.19.0"), ("vm-memory", "0.9.0"), ("bincode", "2.0.1")]
        {
            let faults = in_lock(&[lock("serde", "1.0.1"), lock(name, version)].concat());
            assert_eq!(faults.len(), 1, "{faults:?}");
            assert!(faults[0].contains(name), "{faults:?}");
        }
        for (name, version) in [("kvm-ioctls", "0.19.1"), ("vm-memory", "1.0.0-rc1")] {
            assert_eq!(in_lock(&lock(name, version)), Vec::<String>::new());
        }
    }

    #[test]
    fn own_kind_of_guest_memory_is_found() {
        assert_eq!(in_source("impl VolatileMemory for Mine {"), Some("VolatileMemory"));
        let long = "impl<B: Bitmap> vm_memory::GuestMemoryRegion for Mine<B> {";
        assert_eq!(in_source(long), Some("GuestMemoryRegion"));
        assert_eq!(in_source("impl From<GuestMemory> for X {\n// for VolatileMemory"), None);
    }
}
