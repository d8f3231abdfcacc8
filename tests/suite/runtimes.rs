//! Requests of container runtimes to Firecracker beyond a plain boot, with a real guest.

use std::fs;
use std::io::Read;
use std::os::unix::net::UnixListener;

use pvmm_tests::firecracker::{Firecracker, SOON};
use serde_json::json;

/// A runtime boots a VM with a stub drive for each later container, and replaces the stub by the
/// container's image.
#[test]
fn stub_drives_of_no_bytes_are_patched_to_images_with_a_limit_while_the_guest_runs() {
    let vm = Firecracker::new();
    vm.describe();
    for (id, stub) in [("stub0", ""), ("stub1", "less than a sector")] {
        let path = vm.dir().join(id);
        fs::write(&path, stub).unwrap();
        let drive = json!({"drive_id": id, "is_root_device": false, "path_on_host": path});
        vm.put(&format!("/drives/{id}"), drive);
    }
    vm.start();
    assert_eq!(vm.prints("cat /sys/block/vdb/size /sys/block/vdc/size"), "0\n0");

    let image = vm.dir().join("container");
    fs::write(&image, [b"layer".as_slice(), &[0; (8 << 20) - 5]].concat()).unwrap();
    let bucket = |size: u64| json!({"size": size, "refill_time": 1000});
    let patch =
        |limiter| json!({"drive_id": "stub1", "path_on_host": image, "rate_limiter": limiter});
    // A request that is refused has no effect, not even in part.
    let never = json!({"ops": {"size": 1, "refill_time": 86_400_001}});
    vm.refused("PATCH", "/drives/stub1", patch(never));
    assert_eq!(vm.prints("cat /sys/block/vdc/size"), "0");
    vm.patch("/drives/stub1", patch(json!({"bandwidth": bucket(1 << 20), "ops": bucket(1000)})));
    let seen = "until [ $(cat /sys/block/vdc/size) = 16384 ]; do sleep 0.1; done; \
                dd if=/dev/vdc bs=5 count=1 2>/dev/null";
    assert_eq!(vm.prints(seen), "layer");
    // The read needs eight buckets, of which the first was full.
    let paced = "a=$(date +%s%N); dd if=/dev/vdc of=/dev/null bs=1M iflag=direct 2>/dev/null; \
                 echo $((($(date +%s%N) - a) / 1000000))";
    let ms: u64 = vm.prints(paced).parse().unwrap();
    assert!(ms >= 6000, "8 MiB at 1 MiB/s took {ms} ms");

    // The container has ended, and the stub replaces its image.
    let stub = json!({"drive_id": "stub1", "path_on_host": vm.dir().join("stub1")});
    vm.patch("/drives/stub1", stub);
    vm.prints("until [ $(cat /sys/block/vdc/size) = 0 ]; do sleep 0.1; done");
}

#[test]
fn machine_with_smt_has_two_threads_per_core_also_after_a_load_and_without_it_one() {
    let siblings = "cat /sys/devices/system/cpu/cpu[0-3]/topology/thread_siblings_list";
    let packages = "cat /sys/devices/system/cpu/cpu[0-3]/topology/physical_package_id";
    for (smt, seen) in [(true, "0-1\n0-1\n2-3\n2-3"), (false, "0\n1\n2\n3")] {
        let vm = Firecracker::new();
        vm.describe();
        vm.put("/machine-config", json!({"vcpu_count": 4, "mem_size_mib": 256, "smt": smt}));
        vm.start();
        assert_eq!(vm.prints(siblings), seen);
        assert_eq!(vm.prints(packages), "0\n0\n0\n0");
        let files = json!({"snapshot_path": vm.dir().join("state"), "mem_file_path": vm.dir().join("memory")});
        vm.patch("/vm", json!({"state": "Paused"}));
        vm.put("/snapshot/create", files.clone());
        let copy = Firecracker::new();
        let mut load = files;
        load["vsock_override"] = json!({"uds_path": copy.vsock()});
        load["resume_vm"] = json!(true);
        copy.put("/snapshot/load", load);
        assert_eq!(copy.prints(siblings), seen);
    }
}

#[test]
fn serial_console_with_a_limit_drops_what_goes_beyond_it_and_counts_that() {
    let vm = Firecracker::new();
    vm.describe();
    let (console, metrics) = (vm.dir().join("console"), vm.dir().join("metrics"));
    // The limiter is so slow that it adds nothing while the test runs.
    let limiter = json!({"size": 2000, "refill_time": 80_000_000});
    vm.put("/serial", json!({"serial_out_path": console, "rate_limiter": limiter}));
    vm.put("/metrics", json!({"metrics_path": metrics}));
    vm.start();
    vm.prints("head -c 5000 /dev/zero | tr '\\0' x > /dev/ttyS0");
    vm.until("the console", |_| (fs::metadata(&console).ok()?.len() == 2000).then_some(()));
    vm.put("/actions", json!({"action_type": "FlushMetrics"}));
    let lines = fs::read_to_string(metrics).unwrap();
    let line = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let dropped = line.map(|line| line["uart"]["rate_limiter_dropped_bytes"].as_u64().unwrap());
    assert!(dropped.sum::<u64>() >= 3000, "{lines}");
}

/// The longest path that a socket can have leaves no room for the suffix `_<port>`.
#[test]
fn vsock_with_a_path_of_107_bytes_carries_connections_of_both_sides() {
    let mut vm = Firecracker::new();
    vm.describe();
    let folder = vm.dir().join("f".repeat(107 - vm.dir().as_os_str().len() - 3));
    fs::create_dir(&folder).unwrap();
    let path = folder.join("v");
    assert_eq!(path.as_os_str().len(), 107);
    let long = json!({"guest_cid": 3, "uds_path": format!("{}x", path.display())});
    vm.refused("PUT", "/vsock", long);
    vm.put("/vsock", json!({"guest_cid": 3, "uds_path": path}));
    vm.use_vsock(path);
    let short = vm.dir().join("s");
    let listener = UnixListener::bind(&short).unwrap();
    fs::rename(short, folder.join("v_5000")).unwrap();
    vm.start();
    let code = "import socket; s = socket.socket(socket.AF_VSOCK); s.connect((2, 5000)); \
                s.sendall(b'from the guest')";
    vm.prints(&format!("python3 -c \"{code}\""));
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text, "from the guest");
}
