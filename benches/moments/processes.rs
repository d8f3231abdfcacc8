//! The memory of a process and of the host, as the kernel counts it.

use std::collections::BTreeMap;
use std::fs;

use crate::board::Outcome;
use crate::guest::MEMORY_MIB;

/// Parses a file such as `/proc/meminfo`. Returns sizes in KiB by name.
pub fn sizes(text: &str) -> BTreeMap<&str, f64> {
    let size = |line: &'_ str| -> Option<f64> {
        line.split_whitespace().nth(1).and_then(|word| word.parse().ok())
    };
    let named = |line| {
        let (name, _) = str::split_once(line, ':')?;
        Some((name, size(line)?))
    };
    text.lines().filter_map(named).collect()
}

fn of(sizes: &BTreeMap<&str, f64>, name: &str) -> Outcome<f64> {
    sizes.get(name).map(|kib| kib / 1024.0).ok_or_else(|| format!("no {name}").into())
}

/// Returns the private dirty memory of a process and the size of its page tables, in MiB.
pub fn private_mib(pid: u32) -> Outcome<(f64, f64)> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    Ok((of(&sizes(&rollup), "Private_Dirty")?, of(&sizes(&status), "VmPTE")?))
}

/// Returns the available memory of the host and the size of its kernel's slabs, in MiB.
pub fn host_mib() -> Outcome<(f64, f64)> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let sizes = sizes(&text);
    Ok((of(&sizes, "MemAvailable")?, of(&sizes, "Slab")?))
}

/// Returns the memory that a VMM holds in addition to guest memory, in MiB: the resident size of
/// every mapping that is smaller than guest memory. Firecracker's own tests count by this rule.
pub fn beside_guest_mib(pid: u32) -> Outcome<f64> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    Ok(beside_guest(&smaps, MEMORY_MIB * 1024))
}

fn beside_guest(smaps: &str, guest_kib: u64) -> f64 {
    let (mut total, mut counts) = (0.0, false);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (name, size) = (words.next(), words.next().and_then(|word| word.parse::<u64>().ok()));
        match (name, size) {
            (Some("Size:"), Some(kib)) => counts = kib < guest_kib,
            (Some("Rss:"), Some(kib)) if counts => total += kib as f64 / 1024.0,
            _ => {}
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beside_guest_counts_every_mapping_but_the_guests() {
        let smaps = "7f00-7f01 rw-p 0 00:00 0\nSize: 1024 kB\nRss: 512 kB\n\
                     7f02-7f03 rw-p 0 00:00 0\nSize: 524288 kB\nRss: 99999 kB\n\
                     7f04-7f05 r--p 0 00:00 0\nSize: 8 kB\nRss: 512 kB\n";
        assert_eq!(beside_guest(smaps, 512 * 1024), 1.0);
    }

    #[test]
    fn sizes_of_meminfo_are_by_name() {
        let sizes = sizes("MemAvailable:   2048 kB\nHugePages_Total: 0\nodd line\n");
        assert_eq!(of(&sizes, "MemAvailable").unwrap(), 2.0);
        assert!(of(&sizes, "Slab").is_err());
    }
}
