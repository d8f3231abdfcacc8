//! `pvmm stats`: shows the resource usage of a guest, as its agent reports it.

use std::time::Duration;

use pvmm::agent::Metrics;
use serde::Serialize;

use crate::cli::Stats;
use crate::exit::Outcome;
use crate::output::{self, Table};
use pvmm_sandbox::guest_agent;
use pvmm_sandbox::vm_dir::Base;

/// The time between the two samples of the CPU counters.
const LOOK: Duration = Duration::from_millis(500);

pub fn stats(args: Stats) -> Outcome {
    let vm = Base::open()?.find(&args.vm)?;
    vm.require_running()?;
    let agent =
        guest_agent::connect(&vm.dir, guest_agent::PATIENCE).map_err(guest_agent::refuse)?;
    let before = agent.metrics().map_err(guest_agent::refuse)?;
    std::thread::sleep(LOOK);
    let now = agent.metrics().map_err(guest_agent::refuse)?;
    let row = Row::of(&before, &now);
    if args.json {
        output::json(&row)?
    } else {
        table(&row).print()?
    }
    Ok(0)
}

fn table(row: &Row<'_>) -> Table {
    let of = |used: u64, total: u64| format!("{} of {}", output::bytes(used), output::bytes(total));
    let mut table = Table::new(&["CPU", "LOAD", "MEMORY", "DISK", "PROCESSES", "OOM KILLS"]);
    table.row(vec![
        format!("{:.0}% of {}", row.cpu_percent, row.cpus),
        format!("{:.2}", row.load[0]),
        of(row.memory_used, row.memory_total),
        of(row.disk_used, row.disk_total),
        row.processes.to_string(),
        match row.oom_events.last() {
            Some(last) => format!("{} (last: {}, pid {})", row.oom_kills, last.name, last.pid),
            None => row.oom_kills.to_string(),
        },
    ]);
    table
}

/// Resource usage in the `--json` output; sizes in bytes.
#[derive(Serialize)]
struct Row<'a> {
    uptime_s: f64,
    cpus: u32,
    /// The usage of all CPUs together.
    cpu_percent: f64,
    cpu_busy_s: f64,
    load: [f64; 3],
    memory_total: u64,
    memory_used: u64,
    memory_cached: u64,
    disk_total: u64,
    disk_used: u64,
    processes: u32,
    execs: u32,
    detached: u32,
    oom_kills: u64,
    oom_events: Vec<Victim<'a>>,
}

#[derive(Serialize)]
struct Victim<'a> {
    pid: u32,
    name: &'a str,
    at_s: f64,
    by_limit: bool,
}

impl<'a> Row<'a> {
    fn of(before: &Metrics, now: &'a Metrics) -> Self {
        let seconds = |us: u64| us as f64 / 1e6;
        let busy = now.cpu_busy_us.saturating_sub(before.cpu_busy_us) as f64;
        let idle = now.cpu_idle_us.saturating_sub(before.cpu_idle_us) as f64;
        let kib = |kib: u64| kib.saturating_mul(1024);
        Self {
            uptime_s: seconds(now.uptime_us),
            cpus: now.cpus,
            cpu_percent: if busy + idle > 0.0 { 100.0 * busy / (busy + idle) } else { 0.0 },
            cpu_busy_s: seconds(now.cpu_busy_us),
            load: now.load_centi.map(|load| f64::from(load) / 100.0),
            memory_total: kib(now.memory_total_kib),
            memory_used: kib(now.memory_total_kib.saturating_sub(now.memory_available_kib)),
            memory_cached: kib(now.memory_cached_kib),
            disk_total: now.disk_total_bytes,
            disk_used: now.disk_total_bytes.saturating_sub(now.disk_available_bytes),
            processes: now.processes,
            execs: now.execs,
            detached: now.detached,
            oom_kills: now.oom_kills,
            oom_events: now
                .oom_events
                .iter()
                .map(|it| Victim {
                    pid: it.pid,
                    name: &it.name,
                    at_s: seconds(it.at_us),
                    by_limit: it.by_limit,
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_with_extreme_numbers_are_shown() {
        let metrics = |number: u64| Metrics {
            uptime_us: number,
            cpus: number as u32,
            cpu_busy_us: number,
            cpu_idle_us: number,
            load_centi: [number as u32; 3],
            memory_total_kib: number,
            memory_available_kib: !number,
            disk_total_bytes: number,
            disk_available_bytes: !number,
            oom_kills: number,
            ..Metrics::default()
        };
        for (before, now) in [(0, u64::MAX), (u64::MAX, 0), (u64::MAX, u64::MAX)] {
            let (before, now) = (metrics(before), metrics(now));
            let row = Row::of(&before, &now);
            assert!(row.cpu_percent.is_finite());
            assert!(!table(&row).render().is_empty());
        }
    }
}
