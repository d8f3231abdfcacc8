//! Memory and processor time of a process, as the host's kernel counts them.
//!
//! Only files below `/proc` are read, so a stuck guest cannot delay a reading.

use std::fs::File;
use std::io::Read;
use std::time::Duration;

/// The most bytes of a file that are read; the kernel writes a few KiB.
const MAX_FILE: u64 = 64 << 10;
/// Ticks in a second, as programs on x86-64 see them on every kernel.
const TICKS: u64 = 100;

/// The use that one process makes of its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Memory that only this process has, in bytes.
    pub private: u64,
    /// Memory that other processes or files have too, in bytes.
    pub shared: u64,
    /// Processor time of all its threads since its start.
    pub cpu: Duration,
}

impl Usage {
    /// Reads the use of a process; `None` if the process is gone.
    pub fn of(pid: u32) -> Option<Self> {
        let read = |name: &str| {
            let mut text = String::new();
            let file = File::open(format!("/proc/{pid}/{name}")).ok()?;
            file.take(MAX_FILE).read_to_string(&mut text).ok()?;
            Some(text)
        };
        let cpu = cpu_time(&read("stat")?)?;
        // The page tables say it exactly, but only to a caller that may trace the process.
        let rollup = read("smaps_rollup").and_then(|text| by_page_tables(&text));
        let (private, shared) = match rollup {
            Some(memory) => memory,
            None => by_kind(&read("status")?),
        };
        Some(Self { private, shared, cpu })
    }
}

/// Returns the sum of the lines with these names, in bytes.
fn sum(text: &str, names: &[&str]) -> u64 {
    let value = |line: &str| {
        let (name, value) = line.split_once(':')?;
        let kib = value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
        names.contains(&name).then_some(kib)
    };
    text.lines().filter_map(value).fold(0, u64::saturating_add).saturating_mul(1024)
}

fn by_page_tables(text: &str) -> Option<(u64, u64)> {
    let private = sum(text, &["Private_Clean", "Private_Dirty", "Private_Hugetlb"]);
    let all = sum(text, &["Rss", "Private_Hugetlb", "Shared_Hugetlb"]);
    (all > 0).then(|| (private, all.saturating_sub(private)))
}

/// Tells memory apart by its kind: a page of a template that was written is anonymous memory, and
/// one that was not is the file's.
fn by_kind(text: &str) -> (u64, u64) {
    (sum(text, &["RssAnon"]), sum(text, &["RssFile", "RssShmem"]))
}

fn cpu_time(stat: &str) -> Option<Duration> {
    // The name, in parentheses, may itself have spaces and parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut numbers = rest.split_ascii_whitespace().skip(11);
    let mut ticks = || numbers.next()?.parse::<u64>().ok();
    let ticks = ticks()?.saturating_add(ticks()?);
    Some(Duration::from_millis(ticks.saturating_mul(1000 / TICKS)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_of_this_process_is_read_and_of_none_is_not() {
        let usage = Usage::of(std::process::id()).unwrap();
        assert!(usage.private > 1 << 16 && usage.shared > 1 << 16, "{usage:?}");
        assert_eq!(Usage::of(u32::MAX), None);
    }

    #[test]
    fn memory_is_split_into_private_and_shared() {
        let rollup = "Rss: 100 kB\nPss: 60 kB\nPrivate_Clean: 10 kB\nPrivate_Dirty: 20 kB\n";
        assert_eq!(by_page_tables(rollup), Some((30 << 10, 70 << 10)));
        assert_eq!(by_page_tables("Rss: 0 kB\n"), None);
        let status = "VmRSS: 9 kB\nRssAnon: 4 kB\nRssFile: 3 kB\nRssShmem: 2 kB\n";
        assert_eq!(by_kind(status), (4 << 10, 5 << 10));
    }

    #[test]
    fn cpu_time_follows_a_name_with_parentheses() {
        let stat = "7 (a) b) (c) S 1 1 1 0 -1 0 0 0 0 0 250 50 0 0 20 0 1 0 5";
        assert_eq!(cpu_time(stat), Some(Duration::from_secs(3)));
        assert_eq!(cpu_time("7 (a"), None);
    }
}
