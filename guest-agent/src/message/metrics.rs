//! Messages about the resource use and the resource limits of a guest and its processes.

use serde::{Deserialize, Serialize};

/// In an exec: limits on what the process and all processes it starts use together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes.
    #[serde(default)]
    pub memory: Option<u64>,
    /// Processes and threads.
    #[serde(default)]
    pub pids: Option<u64>,
    /// Thousandths of a processor.
    #[serde(default)]
    pub cpu_milli: Option<u32>,
}

/// The current resource use of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metrics {
    pub uptime_us: u64,
    pub cpus: u32,
    /// Processor time since boot, of all processors together.
    pub cpu_busy_us: u64,
    pub cpu_idle_us: u64,
    /// Processor time that the host gave to others.
    #[serde(default)]
    pub cpu_stolen_us: u64,
    /// The load averages over one, five and fifteen minutes, in hundredths.
    #[serde(default)]
    pub load_centi: [u32; 3],
    pub memory_total_kib: u64,
    pub memory_available_kib: u64,
    #[serde(default)]
    pub memory_cached_kib: u64,
    /// The space of the root filesystem.
    pub disk_total_bytes: u64,
    pub disk_available_bytes: u64,
    pub processes: u32,
    pub execs: u32,
    pub detached: u32,
    /// Processes killed for lack of memory since boot.
    pub oom_kills: u64,
    /// The last of these kills, newest last.
    #[serde(default)]
    pub oom_events: Vec<OomEvent>,
}

/// A process that the kernel killed for lack of memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OomEvent {
    pub pid: u32,
    pub name: String,
    /// The time since boot.
    pub at_us: u64,
    /// An exec's own limit was reached, not that of the guest's memory.
    pub by_limit: bool,
}
