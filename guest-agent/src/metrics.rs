//! Collects the guest's current resource use from the kernel's files.

use std::fs;

use pvmm_guest_agent::message::{Info, Metrics};

use crate::agent::Agent;
use crate::sys;

/// The unit in which the kernel counts processor time.
const TICK_US: u64 = 10_000;

pub fn metrics(agent: &mut Agent) -> Metrics {
    agent.oom.catch_up();
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
    let meminfo = Meminfo::read();
    let (disk_total_bytes, disk_available_bytes) =
        sys::system::disk_space(c"/").unwrap_or_default();
    let is_process = |entry: &fs::DirEntry| {
        entry.file_name().to_str().is_some_and(|name| name.bytes().all(|b| b.is_ascii_digit()))
    };
    let processes = fs::read_dir("/proc")
        .map_or(0, |entries| entries.flatten().filter(is_process).count() as u32);
    Metrics {
        uptime_us: sys::system::uptime().as_micros() as u64,
        cpus: std::thread::available_parallelism().map_or(1, |count| count.get() as u32),
        // Fields: user, nice, system; idle and I/O wait; interrupts; stolen by the host.
        cpu_busy_us: time(0) + time(1) + time(2) + time(5) + time(6),
        cpu_idle_us: time(3) + time(4),
        cpu_stolen_us: time(7),
        load_centi: std::array::from_fn(|_| loads.next().unwrap_or(0)),
        memory_total_kib: meminfo.kib("MemTotal:"),
        memory_available_kib: meminfo.kib("MemAvailable:"),
        memory_cached_kib: meminfo.kib("Cached:"),
        disk_total_bytes,
        disk_available_bytes,
        processes,
        execs: agent.execs(),
        detached: agent.detached.len() as u32,
        oom_kills: agent.oom.total(),
        oom_events: agent.oom.events().cloned().collect(),
    }
}

/// Collects facts about the guest.
pub fn info(agent: &Agent) -> Info {
    let (kernel, hostname) = sys::system::uname();
    let meminfo = Meminfo::read();
    Info {
        agent: env!("CARGO_PKG_VERSION").into(),
        kernel,
        hostname,
        uptime_us: sys::system::uptime().as_micros() as u64,
        cpus: std::thread::available_parallelism().map_or(1, |count| count.get() as u32),
        memory_total_kib: meminfo.kib("MemTotal:"),
        memory_available_kib: meminfo.kib("MemAvailable:"),
        execs: agent.execs(),
        connections: agent.connections.len() as u32,
        cgroups: agent.settings.cgroups.is_some(),
        generation: agent.identity.generation,
        frozen: agent.is_frozen(),
    }
}

/// The contents of the kernel's file about memory.
struct Meminfo(String);

impl Meminfo {
    fn read() -> Self {
        Self(fs::read_to_string("/proc/meminfo").unwrap_or_default())
    }

    fn kib(&self, name: &str) -> u64 {
        let line = self.0.lines().find_map(|line| line.strip_prefix(name));
        let figure = line.and_then(|line| line.split_ascii_whitespace().next());
        figure.and_then(|figure| figure.parse().ok()).unwrap_or(0)
    }
}
