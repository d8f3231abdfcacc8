//! Metrics for a supervisor: one line of JSON with Firecracker's names, written on request, every
//! minute, and at the end.
//!
//! As in Firecracker, a counter is the increase since the previous line, and the first line is
//! written as soon as there is a VM.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pvmm::DeviceCounters;
use serde_json::{Map, Value, json};

use super::bodies;
use super::http::{Method, Refusal};
use super::logger;
use super::metric_names;
use super::running::Running;
use pvmm_sandbox::sys::process;

/// The interval between lines that no client requested.
const PERIOD: Duration = Duration::from_secs(60);

const GET: [&str; 4] = ["instance_info", "machine_cfg", "mmds", "vmm_version"];
const PUT: [&str; 11] = [
    "actions",
    "boot_source",
    "cpu_cfg",
    "drive",
    "logger",
    "machine_cfg",
    "metrics",
    "mmds",
    "network",
    "serial",
    "vsock",
];
const PATCH: [&str; 4] = ["drive", "machine_cfg", "mmds", "network"];

/// Latencies that Firecracker reports twice, for the API and for the VMM; here both are one thread
/// and one value.
const LATENCIES: [&str; 5] =
    ["full_create_snapshot", "diff_create_snapshot", "load_snapshot", "pause_vm", "resume_vm"];

pub struct Metrics {
    id: String,
    target: Option<Target>,
    counts: BTreeMap<String, u64>,
    latencies: BTreeMap<&'static str, u64>,
    deprecated: u64,
    missed: u64,
    startup: (u64, u64),
    devices: BTreeMap<String, [u64; 3]>,
    limited_bytes: u64,
    next: Instant,
}

struct Target {
    file: File,
    emit_id: bool,
    properties: Option<BTreeMap<String, String>>,
}

impl Metrics {
    pub fn new(id: &str) -> Self {
        Self {
            id: id.to_owned(),
            target: None,
            counts: BTreeMap::new(),
            latencies: BTreeMap::new(),
            deprecated: 0,
            missed: 0,
            startup: (0, 0),
            devices: BTreeMap::new(),
            limited_bytes: 0,
            next: Instant::now() + PERIOD,
        }
    }

    /// Records the start times, in microseconds, that the parent process passed on the command
    /// line.
    pub fn note_start(&mut self, start: Option<u64>, start_cpu: Option<u64>, parent: Option<u64>) {
        if let Some(start) = start {
            self.startup.0 = process::monotonic_us().saturating_sub(start);
        }
        if let Some(start) = start_cpu {
            let used = process::cpu_us().saturating_sub(start);
            self.startup.1 = used.saturating_add(parent.unwrap_or(0));
        }
    }

    pub fn configure(&mut self, wish: bodies::Metrics) -> Result<(), Refusal> {
        if self.target.is_some() {
            return Err(Refusal::bad("Metrics: they have a place already."));
        }
        let file = logger::open(&wish.metrics_path).map_err(|error| {
            Refusal::bad(format!("Metrics: metrics_path {:?}: {error}", wish.metrics_path))
        })?;
        let bodies::Metrics { emit_id, properties, .. } = wish;
        self.target = Some(Target { file, emit_id, properties });
        self.next = Instant::now() + PERIOD;
        Ok(())
    }

    /// Returns when the next periodic line is due.
    pub fn due(&self) -> Option<Instant> {
        self.target.as_ref().map(|_| self.next)
    }

    pub fn count_request(&mut self, method: Method, path: &str, failed: bool) {
        let first = path.trim_start_matches('/').split('/').next().unwrap_or_default();
        let name = match first {
            "" => "instance_info",
            "version" => "vmm_version",
            "machine-config" => "machine_cfg",
            "cpu-config" => "cpu_cfg",
            "boot-source" => "boot_source",
            "drives" => "drive",
            "network-interfaces" => "network",
            other => other,
        };
        let (group, known) = match method {
            Method::Get => ("get", &GET[..]),
            Method::Put => ("put", &PUT[..]),
            Method::Patch => ("patch", &PATCH[..]),
            Method::Delete => return,
        };
        if known.contains(&name) {
            *self.counts.entry(format!("{group}/{name}_count")).or_default() += 1;
            if failed && method != Method::Get {
                *self.counts.entry(format!("{group}/{name}_fails")).or_default() += 1;
            }
        }
    }

    pub fn count_deprecated(&mut self) {
        self.deprecated += 1;
    }

    pub fn took(&mut self, what: &'static str, time: Duration) {
        self.latencies.insert(what, u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    /// Writes a line of metrics, if a file for it is set.
    pub fn flush(&mut self, machine: Option<&Running>) -> io::Result<()> {
        self.next = Instant::now() + PERIOD;
        if self.target.is_none() {
            return Ok(());
        }
        let mut line = self.line(machine).to_string();
        line.push('\n');
        let Some(target) = &mut self.target else { return Ok(()) };
        let written = target.file.write_all(line.as_bytes());
        if written.is_err() {
            self.missed += 1;
        }
        written
    }

    fn line(&mut self, machine: Option<&Running>) -> Value {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let counts = std::mem::take(&mut self.counts);
        let group = |group: &str, names: &[&str], fails: bool| {
            let mut map = Map::new();
            let mut put = |name: String| {
                let count = counts.get(&format!("{group}/{name}")).copied().unwrap_or(0);
                map.insert(name, count.into());
            };
            for name in names {
                put(format!("{name}_count"));
                if fails {
                    put(format!("{name}_fails"));
                }
            }
            Value::Object(map)
        };
        let mut latencies = Map::new();
        for name in LATENCIES {
            let time = self.latencies.get(name).copied().unwrap_or(0);
            latencies.insert(name.to_owned(), time.into());
            latencies.insert(format!("vmm_{name}"), time.into());
        }
        let mut line = json!({
            "utc_timestamp_ms": u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            "api_server": {
                "process_startup_time_us": self.startup.0,
                "process_startup_time_cpu_us": self.startup.1,
            },
            "deprecated_api": { "deprecated_http_api_calls": std::mem::take(&mut self.deprecated) },
            "get_api_requests": group("get", &GET, false),
            "put_api_requests": group("put", &PUT, true),
            "patch_api_requests": group("patch", &PATCH, true),
            "latencies_us": latencies,
            "logger": {
                "missed_metrics_count": std::mem::take(&mut self.missed),
                "missed_log_count": logger::missed(),
            },
        });
        if let Value::Object(line) = &mut line {
            if let Some(machine) = machine {
                self.add_devices(line, machine);
            }
            metric_names::complete(line);
            if let Some(Target { emit_id: true, .. }) = &self.target {
                line.insert("id".to_owned(), self.id.clone().into());
            }
            if let Some(Target { properties: Some(properties), .. }) = &self.target {
                line.insert("properties".to_owned(), json!(properties));
            }
        }
        line
    }

    /// Adds the counters of each device, and their sums over all devices of a kind.
    fn add_devices(&mut self, line: &mut Map<String, Value>, machine: &Running) {
        let mut sums: BTreeMap<&str, [u64; 3]> = BTreeMap::new();
        for (name, DeviceCounters { device, values }) in machine.named_counters() {
            let now = [values.served, values.refused, values.faults];
            let before = self.devices.insert(name.clone(), now).unwrap_or_default();
            let since: [u64; 3] = std::array::from_fn(|i| now[i].saturating_sub(before[i]));
            let sum = sums.entry(device).or_default();
            (0..3).for_each(|i| sum[i] += since[i]);
            if name != device {
                line.insert(name, device_json(device, since));
            }
        }
        let limited = machine.vm.console_limited_bytes();
        let before = std::mem::replace(&mut self.limited_bytes, limited);
        let since = limited.saturating_sub(before);
        line.insert("uart".to_owned(), json!({ "rate_limiter_dropped_bytes": since }));
        for (device, sum) in sums {
            let name = if device == "rng" { "entropy" } else { device };
            line.insert(name.to_owned(), device_json(device, sum));
        }
    }
}

/// Names a device's three counters: chains returned, requests refused, times it gave up on its
/// driver.
fn device_json(device: &str, [served, refused, faults]: [u64; 3]) -> Value {
    match device {
        "block" => {
            json!({ "invalid_reqs_count": refused, "event_fails": faults, "served": served })
        }
        "rng" => json!({ "entropy_event_fails": faults, "entropy_event_count": served }),
        _ => json!({ "event_fails": refused + faults, "served": served }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_has_what_came_since_the_line_before() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("metrics");
        let mut metrics = Metrics::new("vm-1");
        metrics.flush(None).unwrap();
        let properties = Some([("a".to_owned(), "b".to_owned())].into());
        let wish = bodies::Metrics { metrics_path: path.clone(), emit_id: true, properties };
        metrics.configure(wish.clone()).unwrap();
        assert_eq!(metrics.configure(wish).unwrap_err().status, 400);
        metrics.count_request(Method::Put, "/drives/rootfs", true);
        metrics.count_request(Method::Put, "/cpu-config", false);
        metrics.count_request(Method::Get, "/", false);
        metrics.took("pause_vm", Duration::from_micros(17));
        metrics.flush(None).unwrap();
        metrics.flush(None).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0]["put_api_requests"]["drive_count"], 1);
        assert_eq!(lines[0]["put_api_requests"]["drive_fails"], 1);
        assert_eq!(lines[0]["put_api_requests"]["cpu_cfg_count"], 1);
        assert_eq!(lines[0]["get_api_requests"]["instance_info_count"], 1);
        assert_eq!(lines[0]["latencies_us"]["vmm_pause_vm"], 17);
        assert_eq!((&lines[0]["id"], &lines[0]["properties"]["a"]), (&json!("vm-1"), &json!("b")));
        assert_eq!(lines[1]["put_api_requests"]["drive_count"], 0);
    }
}
