//! What the guest uses now, from the kernel's own files.

use std::fs;

use pvmm_guest_agent::message::Metrics;

use crate::job::Job;
use crate::server::Server;
use crate::sys;

/// The kernel counts processor time in these.
const TICK_US: u64 = 10_000;

impl Server {
    pub(crate) fn metrics(&mut self) -> Metrics {
        self.oom.catch_up();
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let times: Vec<u64> = stat
            .lines()
            .next()
            .map(|line| line.split_ascii_whitespace().skip(1).flat_map(str::parse).collect())
            .unwrap_or_default();
        let time = |index: usize| times.get(index).copied().unwrap_or(0) * TICK_US;
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let mut loads = load.split(' ').map(|text| {
            let text = text.replace('.', "");
            text.parse().unwrap_or(0)
        });
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kib = |name: &str| -> u64 {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
            let figure = line.and_then(|line| line.split_ascii_whitespace().next());
            figure.and_then(|figure| figure.parse().ok()).unwrap_or(0)
        };
        let (disk_total_bytes, disk_available_bytes) = sys::disk_space(c"/").unwrap_or_default();
        let is_process = |entry: &fs::DirEntry| {
            entry.file_name().to_str().is_some_and(|name| name.bytes().all(|b| b.is_ascii_digit()))
        };
        let processes = fs::read_dir("/proc")
            .map_or(0, |entries| entries.flatten().filter(is_process).count() as u32);
        Metrics {
            uptime_us: sys::uptime().as_micros() as u64,
            cpus: std::thread::available_parallelism().map_or(1, |count| count.get() as u32),
            // user, nice, system; then idle and waiting for disks; then interrupts and the host.
            cpu_busy_us: time(0) + time(1) + time(2) + time(5) + time(6),
            cpu_idle_us: time(3) + time(4),
            cpu_stolen_us: time(7),
            load_centi: std::array::from_fn(|_| loads.next().unwrap_or(0)),
            memory_total_kib: kib("MemTotal:"),
            memory_available_kib: kib("MemAvailable:"),
            memory_cached_kib: kib("Cached:"),
            disk_total_bytes,
            disk_available_bytes,
            processes,
            execs: self.pids.len() as u32,
            detached: self.jobs.values().filter(|job| Job::outliving(job).is_some()).count() as u32,
            oom_kills: self.oom.total(),
            oom_events: self.oom.events().cloned().collect(),
        }
    }
}
