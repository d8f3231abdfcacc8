//! The facts of a run: host, guest and contenders. Without them its numbers cannot be compared.

use std::fs;

use serde_json::{Value, json};

/// Adds the facts of this host to `known`, the facts of the guest and the contenders.
pub fn of(mut known: Value) -> Value {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpuinfo = read("/proc/cpuinfo");
    let of_cpu = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_once(':').map_or("", |(_, value)| value.trim()).to_owned()
    };
    let flags = of_cpu("flags");
    let host = json!({
        "pvmm": env!("CARGO_PKG_VERSION"),
        "host_kernel": read("/proc/sys/kernel/osrelease"),
        "kvm": pvmm::kvm::host::backend(),
        "cpu": of_cpu("model name"),
        "processors": std::thread::available_parallelism().map_or(0, usize::from),
        "virtualised": flags.split(' ').any(|flag| flag == "hypervisor"),
        "emulated": emulated(),
        "addresses": if emulated() { "fixed" } else { "random" },
        "load": read("/proc/loadavg"),
        "huge_pages": read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "images": "tmpfs, in memory",
        "pool": 0,
        "other_machines": 1,
        "jailed": false,
    });
    if let (Value::Object(known), Value::Object(host)) = (&mut known, host) {
        known.extend(host);
    }
    known
}

/// Returns whether this is a nested host, whose processor is emulated.
pub fn emulated() -> bool {
    std::env::var_os("PVMM_NESTED_HOST").is_some()
}
