//! The names of all fields in a line of Firecracker's metrics, by group.
//!
//! Clients that deserialize the line into a type refuse one that lacks a field. Fields that pvmm
//! does not count are zero; `docs/firecracker.md` lists those that it does.

use serde_json::{Map, Value, json};

/// A group's name, its counters, and its latencies, each of which is three numbers.
type Group = (&'static str, &'static [&'static str], &'static [&'static str]);

const GROUPS: &[Group] = &[
    (
        "api_server",
        &[
            "process_startup_time_us",
            "process_startup_time_cpu_us",
            "sync_response_fails",
            "sync_vmm_send_timeout_count",
        ],
        &[],
    ),
    (
        "balloon",
        &[
            "activate_fails",
            "inflate_count",
            "stats_updates_count",
            "stats_update_fails",
            "deflate_count",
            "event_fails",
        ],
        &[],
    ),
    (
        "block",
        &[
            "activate_fails",
            "cfg_fails",
            "no_avail_buffer",
            "event_fails",
            "execute_fails",
            "invalid_reqs_count",
            "flush_count",
            "queue_event_count",
            "rate_limiter_event_count",
            "update_count",
            "update_fails",
            "read_bytes",
            "write_bytes",
            "read_count",
            "write_count",
            "rate_limiter_throttled_events",
            "io_engine_throttled_events",
            "remaining_reqs_count",
        ],
        &["read_agg", "write_agg"],
    ),
    ("deprecated_api", &["deprecated_http_api_calls", "deprecated_cmd_line_api_calls"], &[]),
    (
        "get_api_requests",
        &["instance_info_count", "machine_cfg_count", "mmds_count", "vmm_version_count"],
        &[],
    ),
    (
        "patch_api_requests",
        &[
            "drive_count",
            "drive_fails",
            "network_count",
            "network_fails",
            "machine_cfg_count",
            "machine_cfg_fails",
            "mmds_count",
            "mmds_fails",
        ],
        &[],
    ),
    (
        "put_api_requests",
        &[
            "actions_count",
            "actions_fails",
            "boot_source_count",
            "boot_source_fails",
            "drive_count",
            "drive_fails",
            "logger_count",
            "logger_fails",
            "machine_cfg_count",
            "machine_cfg_fails",
            "cpu_cfg_count",
            "cpu_cfg_fails",
            "metrics_count",
            "metrics_fails",
            "network_count",
            "network_fails",
            "mmds_count",
            "mmds_fails",
            "vsock_count",
            "vsock_fails",
        ],
        &[],
    ),
    (
        "i8042",
        &[
            "error_count",
            "missed_read_count",
            "missed_write_count",
            "read_count",
            "write_count",
            "reset_count",
        ],
        &[],
    ),
    (
        "uart",
        &[
            "error_count",
            "flush_count",
            "missed_read_count",
            "missed_write_count",
            "rate_limiter_dropped_bytes",
            "read_count",
            "write_count",
        ],
        &[],
    ),
    (
        "latencies_us",
        &[
            "full_create_snapshot",
            "diff_create_snapshot",
            "load_snapshot",
            "pause_vm",
            "resume_vm",
            "vmm_full_create_snapshot",
            "vmm_diff_create_snapshot",
            "vmm_load_snapshot",
            "vmm_pause_vm",
            "vmm_resume_vm",
        ],
        &[],
    ),
    ("logger", &["missed_metrics_count", "metrics_fails", "missed_log_count", "log_fails"], &[]),
    (
        "mmds",
        &[
            "rx_accepted",
            "rx_accepted_err",
            "rx_accepted_unusual",
            "rx_bad_eth",
            "rx_count",
            "tx_bytes",
            "tx_count",
            "tx_errors",
            "tx_frames",
            "connections_created",
            "connections_destroyed",
        ],
        &[],
    ),
    (
        "net",
        &[
            "activate_fails",
            "cfg_fails",
            "mac_address_updates",
            "no_rx_avail_buffer",
            "no_tx_avail_buffer",
            "event_fails",
            "rx_queue_event_count",
            "rx_event_rate_limiter_count",
            "rx_partial_writes",
            "rx_rate_limiter_throttled",
            "rx_tap_event_count",
            "rx_bytes_count",
            "rx_packets_count",
            "rx_fails",
            "rx_count",
            "tap_read_fails",
            "tap_write_fails",
            "tx_bytes_count",
            "tx_malformed_frames",
            "tx_fails",
            "tx_count",
            "tx_packets_count",
            "tx_partial_reads",
            "tx_queue_event_count",
            "tx_rate_limiter_event_count",
            "tx_rate_limiter_throttled",
            "tx_spoofed_mac_count",
            "tx_remaining_reqs_count",
        ],
        &["tap_write_agg"],
    ),
    ("seccomp", &["num_faults"], &[]),
    (
        "vcpu",
        &["exit_io_in", "exit_io_out", "exit_mmio_read", "exit_mmio_write", "failures"],
        &["exit_io_in_agg", "exit_io_out_agg", "exit_mmio_read_agg", "exit_mmio_write_agg"],
    ),
    ("vmm", &["device_events", "panic_count"], &[]),
    ("signals", &["sigbus", "sigsegv", "sigxfsz", "sigxcpu", "sigpipe", "sighup", "sigill"], &[]),
    (
        "vsock",
        &[
            "activate_fails",
            "cfg_fails",
            "rx_queue_event_fails",
            "tx_queue_event_fails",
            "ev_queue_event_fails",
            "muxer_event_fails",
            "conn_event_fails",
            "rx_queue_event_count",
            "tx_queue_event_count",
            "rx_bytes_count",
            "tx_bytes_count",
            "rx_packets_count",
            "tx_packets_count",
            "conns_added",
            "conns_killed",
            "conns_removed",
            "killq_resync",
            "tx_flush_fails",
            "tx_write_fails",
            "rx_read_fails",
        ],
        &[],
    ),
    (
        "entropy",
        &[
            "activate_fails",
            "entropy_event_fails",
            "entropy_event_count",
            "entropy_bytes",
            "host_rng_fails",
            "entropy_rate_limiter_throttled",
            "rate_limiter_event_count",
        ],
        &[],
    ),
];

/// Adds the fields that `line` lacks, with value zero.
pub fn complete(line: &mut Map<String, Value>) {
    for (group, numbers, times) in GROUPS {
        let group = line.entry(*group).or_insert_with(|| json!({}));
        let Value::Object(group) = group else { continue };
        for name in *numbers {
            group.entry(*name).or_insert_with(|| 0.into());
        }
        for name in *times {
            group.entry(*name).or_insert_with(|| json!({ "min_us": 0, "max_us": 0, "sum_us": 0 }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_added_and_numbers_stay() {
        let mut line = Map::new();
        line.insert("block".to_owned(), json!({ "event_fails": 3 }));
        complete(&mut line);
        assert_eq!(
            (&line["block"]["event_fails"], &line["block"]["read_bytes"]),
            (&3.into(), &0.into())
        );
        assert_eq!(line["vcpu"]["exit_io_in_agg"]["sum_us"], 0);
        assert_eq!(line["put_api_requests"]["actions_count"], 0);
    }
}
