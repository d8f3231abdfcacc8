//! The binary in the place of Firecracker, with a real guest: the requests of known clients, and of bad ones.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use pvmm_tests::firecracker::{Firecracker, prints, reply};
use serde_json::{Value, json};

fn start_again(vm: &Firecracker) -> String {
    vm.refused("PUT", "/actions", json!({"action_type": "InstanceStart"}))
}

/// Sequence A of a known platform's SDK, then pause, resume, exec, and the guest's own end.
#[test]
fn guest_boots_by_the_api_and_ends_the_process_with_code_0() {
    let mut vm = Firecracker::with(&["--id", "vm-1"]);
    let fresh = json!({"id": "vm-1", "state": "Not started", "app_name": "Firecracker",
                       "vmm_version": vm.get("/version")["firecracker_version"]});
    assert_eq!(vm.get("/"), fresh);
    assert_eq!(vm.get("/machine-config")["mem_size_mib"], 128);
    let log = vm.dir().join("vm.log");
    vm.put(
        "/logger",
        json!({"log_path": log, "level": "Info", "show_level": true,
                             "show_log_origin": false}),
    );
    vm.put("/machine-config", json!({"vcpu_count": 1, "mem_size_mib": 256}));
    // A second time replaces the first.
    let machine = json!({"vcpu_count": 2, "mem_size_mib": 256, "smt": false, "huge_pages": "2M"});
    vm.put("/machine-config", machine);
    assert_eq!(vm.get("/machine-config")["vcpu_count"], 2);
    assert!(start_again(&vm).contains("without kernel configuration"));
    vm.describe();
    let agent = vm.start();
    assert_eq!(
        prints(&agent, "nproc; cat /proc/cmdline | tr ' ' '\\n' | grep ^root="),
        "2\nroot=/dev/vda"
    );
    assert_eq!(vm.get("/")["state"], "Running");
    assert_eq!(
        start_again(&vm),
        "The requested operation is not supported after starting the microVM."
    );

    for state in ["Paused", "Paused", "Resumed", "Resumed"] {
        vm.patch("/vm", json!({"state": state}));
        let shown = if state == "Paused" { "Paused" } else { "Running" };
        assert_eq!(vm.get("/")["state"], shown);
    }
    assert_eq!(vm.prints("echo $((6 * 7))"), "42");
    let config = vm.get("/vm/config");
    assert_eq!(config["drives"][0]["drive_id"], "rootfs");
    assert_eq!(config["vsock"]["guest_cid"], 3);
    let _ = agent.shutdown(pvmm::agent::ShutdownHow::Reboot, Some(Duration::from_secs(1)));
    assert_eq!(vm.ends(), Some(0));
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains(":INFO]") && log.contains("InstanceStart"), "{log}");
    // The socket stays, for its owner to remove.
    assert!(vm.socket().exists());
}

/// What each published client sends that others do not, as it was recorded.
#[test]
fn requests_with_the_quirks_of_known_clients_are_taken() {
    let vm = Firecracker::new();
    let kernel = pvmm_tests::guest::default_kernel().vmlinux;
    let sent = |headers: &str, method: &str, path: &str, body: String| {
        let len = body.len();
        let text =
            format!("{method} {path} HTTP/1.1\r\n{headers}Content-Length: {len}\r\n\r\n{body}");
        let reply = vm.raw(text.as_bytes());
        assert_eq!(reply.status, 204, "{reply:?}");
    };
    let nulls = json!({"kernel_image_path": kernel, "initrd_path": null, "boot_args": null});
    sent("", "PUT", "/boot-source", nulls.to_string());
    let root = json!({"drive_id": "rootfs", "is_root_device": true, "is_read_only": true,
                      "partuuid": null, "cache_type": "Unsafe", "io_engine": null,
                      "rate_limiter": null, "path_on_host": pvmm_tests::guest::base().rootfs});
    sent("host: 2f746d702f6170692e736f636b:0\r\n", "PUT", "/drives/rootfs", root.to_string());
    let python = "Host: localhost\r\nUser-Agent: python-requests/2.31.0\r\nAccept: */*\r\n\
                  Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\n\
                  Content-Type: application/json\r\n";
    sent(python, "PUT", "/vsock", json!({"guest_cid": 3, "uds_path": vm.vsock()}).to_string());
    let go = "Host: localhost\r\nUser-Agent: Go-http-client/1.1\r\nAccept: application/json\r\n\
              Content-Type: application/json\r\nAccept-Encoding: gzip\r\n";
    sent(go, "PUT", "/entropy", "{}".to_owned());
    sent(go, "PUT", "/actions", json!({"action_type": "InstanceStart", }).to_string());
    assert_eq!(vm.get("/")["state"], "Running");
    assert_eq!(vm.get("/machine-config")["vcpu_count"], 1);
}

/// A hundred clients that all start the same machine; one that leaves in the middle; one that is slow; and
/// bodies that are no bodies.
#[test]
fn i5_bad_clients_get_the_right_status_and_the_machine_lives_on() {
    let vm = Firecracker::new();
    vm.describe();
    let mut slow = vm.connect();
    slow.write_all(b"PUT /actions HTTP/1.1\r\nContent-Le").unwrap();
    let begun = Instant::now();
    let mut gone = vm.connect();
    gone.write_all(b"PUT /actions HTTP/1.1\r\nContent-Length: 31\r\n\r\n{\"action_type\":")
        .unwrap();
    drop(gone);
    let statuses: Vec<u16> = thread::scope(|scope| {
        let start = || vm.ask("PUT", "/actions", &json!({"action_type": "InstanceStart"})).status;
        let clients: Vec<_> = (0..100).map(|_| scope.spawn(start)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert_eq!(statuses.iter().filter(|status| **status == 204).count(), 1, "{statuses:?}");
    assert_eq!(statuses.iter().filter(|status| **status == 400).count(), 99, "{statuses:?}");
    for head in ["Content-Length: -1", "Content-Length: 51201", "Transfer-Encoding: chunked"] {
        let reply = vm.raw(format!("PUT /mmds HTTP/1.1\r\n{head}\r\n\r\naaa").as_bytes());
        assert_eq!(reply.status, 400, "{head}: {reply:?}");
    }
    assert!(vm.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n").status >= 400);
    let deep = "[".repeat(10_000);
    let text = format!("PUT /mmds HTTP/1.1\r\nContent-Length: 10000\r\n\r\n{deep}");
    assert_eq!(vm.raw(text.as_bytes()).status, 400);
    assert_eq!(reply(&mut slow, begun).status, 408);
    vm.agent();
    assert_eq!(vm.prints("echo alive"), "alive");
}

#[test]
fn console_is_on_standard_output_and_input() {
    let mut vm = Firecracker::new();
    vm.describe();
    let agent = vm.start();
    prints(&agent, "echo said-by-guest > /dev/ttyS0");
    vm.until("the word", |vm| vm.console().contains("said-by-guest").then_some(()));
    let reading =
        thread::spawn(move || prints(&agent, "read -r line < /dev/ttyS0; echo got $line"));
    thread::sleep(Duration::from_secs(1));
    vm.types("typed by hand\n");
    assert_eq!(reading.join().unwrap(), "got typed by hand");
}

#[test]
fn drive_is_replaced_and_grown_while_the_guest_runs_and_while_it_is_paused() {
    let vm = Firecracker::new();
    vm.describe();
    let image = |name: &str, mib: u64| {
        let path = vm.dir().join(name);
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(mib << 20).unwrap();
        path
    };
    let (first, second) = (image("first", 8), image("second", 32));
    let limiter = json!({"ops": {"size": 1000, "refill_time": 100}});
    vm.put(
        "/drives/vol1",
        json!({"drive_id": "vol1", "is_root_device": false, "path_on_host": first,
                                  "io_engine": "Sync", "rate_limiter": limiter}),
    );
    vm.start();
    let size = |vm: &Firecracker| vm.prints("sleep 0.3; cat /sys/block/vdb/size");
    assert_eq!(size(&vm), "16384");
    image("first", 16);
    vm.patch("/drives/vol1", json!({"drive_id": "vol1", "path_on_host": first}));
    assert_eq!(size(&vm), "32768");
    vm.patch("/vm", json!({"state": "Paused"}));
    vm.patch("/drives/vol1", json!({"drive_id": "vol1", "path_on_host": second}));
    let bad =
        vm.refused("PATCH", "/drives/vol1", json!({"drive_id": "vol1", "path_on_host": "/no"}));
    assert!(bad.contains("/no"), "{bad}");
    assert!(vm.refused("PATCH", "/drives/no", json!({"drive_id": "no"})).contains("no drive"));
    vm.patch("/vm", json!({"state": "Resumed"}));
    assert_eq!(size(&vm), "65536");
    let none = json!({"ops": {"size": 0, "refill_time": 0}});
    vm.patch("/drives/vol1", json!({"drive_id": "vol1", "rate_limiter": none}));
    assert_eq!(vm.get("/vm/config")["drives"][1]["rate_limiter"], Value::Null);
}

#[test]
fn i7_socket_that_is_there_already_and_bad_flags_end_the_process_with_their_codes() {
    let vm = Firecracker::new();
    let socket = vm.socket().display().to_string();
    let code = |flags: &[&str]| {
        let mut command = std::process::Command::new(vm.dir().join("firecracker"));
        let output = command.args(flags).stdin(std::process::Stdio::null()).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    assert_eq!(code(&["--api-sock", &socket]).0, Some(1));
    assert_eq!(code(&["--nothing"]).0, Some(153));
    assert_eq!(code(&["--level", "loud"]).0, Some(152));
    let (status, version) = code(&["--version"]);
    assert_eq!(status, Some(0));
    assert!(version.lines().next().unwrap().starts_with("Firecracker v1.16.0-pvmm-"), "{version}");
}
