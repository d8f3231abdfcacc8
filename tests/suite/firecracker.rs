//! The binary in the place of Firecracker, with a real guest: the requests of known clients, and of
//! bad ones.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use pvmm_tests::firecracker::{Firecracker, prints, reply};
use serde_json::{Value, json};

fn start_again(vm: &Firecracker) -> String {
    vm.refused("PUT", "/actions", json!({"action_type": "InstanceStart"}))
}

/// Sequence A of a known platform's SDK, then pause, resume, exec, and an end by the guest itself.
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
    // The second request replaces the first.
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
    // The sockets stay, for the caller to remove.
    assert!(vm.socket().exists() && vm.vsock().exists());
}

/// The requests in which published clients differ from others, as they were recorded.
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

/// A hundred clients that start one VM, a client that disconnects in the middle of a request, a
/// slow client, and invalid bodies.
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

/// A guest that was paused and saved in two files, as a platform bakes one.
struct Baked {
    dir: tempfile::TempDir,
    vm: Firecracker,
}

impl Baked {
    fn of(vm: Firecracker) -> Self {
        let baked = Self { dir: tempfile::TempDir::new().unwrap(), vm };
        baked.vm.patch("/vm", json!({"state": "Paused"}));
        baked.save("Full");
        baked
    }

    /// Leaves a folder beside the files, as a killed `pvmm snapshot` does.
    fn leave_an_unfinished_folder(&self) -> std::path::PathBuf {
        let left = self.dir.path().join(".pvmm-unfinished-0");
        std::fs::create_dir(&left).unwrap();
        std::fs::write(left.join("memory.bin"), "half").unwrap();
        left
    }

    fn save(&self, kind: &str) {
        let body = json!({"snapshot_type": kind, "snapshot_path": self.state(),
                          "mem_file_path": self.memory()});
        self.vm.put("/snapshot/create", body);
    }

    fn state(&self) -> std::path::PathBuf {
        self.dir.path().join("vm.state")
    }

    fn memory(&self) -> std::path::PathBuf {
        self.dir.path().join("vm.mem")
    }

    /// Returns the body of a load into `vm`, with the vsock socket of `vm`.
    fn load(&self, vm: &Firecracker) -> Value {
        json!({"snapshot_path": self.state(), "mem_file_path": self.memory(),
               "vsock_override": {"uds_path": vm.vsock()}})
    }
}

/// Returns how much slower this host is than one on which a round trip over a Unix socket takes 0.1
/// ms, as on ordinary hosts. The result is between 1 and 16.
fn slowness(vm: &Firecracker) -> f64 {
    let ask = || vm.ask("GET", "/version", &Value::Null).took;
    let mut times: Vec<Duration> = (0..21).map(|_| ask()).collect();
    times.sort();
    (times[10].as_secs_f64() / 0.0001).clamp(1.0, 16.0)
}

fn limit(what: &str, took: Duration, limit_ms: f64, factor: f64) {
    println!("{what}: {took:?}, of {limit_ms} ms times {factor:.1}");
    assert!(took.as_secs_f64() * 1000.0 <= limit_ms * factor, "{what}: {took:?}");
}

/// Sequences A, C and B of a known platform, with its time limits: a guest is baked, and restored
/// in another process on another tap, with another root drive and socket.
#[test]
fn snapshot_goes_on_in_another_process_with_another_tap_drive_and_socket() {
    pvmm_tests::network::isolated(|| {
        let vm = Firecracker::new();
        let factor = slowness(&vm);
        let log = json!({"log_path": vm.dir().join("vm.log"), "level": "Info", "show_level": true,
                         "show_log_origin": false});
        limit("PUT logger", vm.put("/logger", log), 500.0, factor);
        for (path, took) in vm.describe() {
            limit(path, took, if path.starts_with("/drives") { 250.0 } else { 500.0 }, factor);
        }
        let machine = json!({"vcpu_count": 1, "mem_size_mib": 256});
        limit("PUT machine-config", vm.put("/machine-config", machine), 500.0, factor);
        let card = json!({"iface_id": "1", "host_dev_name": "tap-baked",
                          "guest_mac": "06:00:ac:10:00:02"});
        limit("PUT network-interfaces", vm.put("/network-interfaces/1", card), 500.0, factor);
        let volume = vm.dir().join("volume");
        std::fs::File::create(&volume).unwrap().set_len(8 << 20).unwrap();
        let drive = json!({"drive_id": "vol1", "is_root_device": false, "path_on_host": volume});
        limit("PUT drives", vm.put("/drives/vol1", drive), 250.0, factor);
        let start = json!({"action_type": "InstanceStart"});
        limit("InstanceStart", vm.put("/actions", start), 500.0, factor);
        vm.agent();
        vm.prints("echo baked > /tmp/word");
        limit("PATCH vm", vm.patch("/vm", json!({"state": "Paused"})), 500.0, factor);
        let baked = Baked::of(vm);
        assert_eq!(std::fs::metadata(baked.memory()).unwrap().len(), 256 << 20);
        baked.vm.patch("/vm", json!({"state": "Resumed"}));
        assert_eq!(baked.vm.prints("cat /tmp/word"), "baked");

        let vm = Firecracker::with(&["--level", "Info"]);
        let mut load = baked.load(&vm);
        load["resume_vm"] = json!(false);
        load["network_overrides"] = json!([{"iface_id": "1", "host_dev_name": "tap0"}]);
        limit("PUT snapshot/load", vm.put("/snapshot/load", load.clone()), 10_000.0, 1.0);
        assert_eq!(vm.get("/")["state"], "Paused");
        let after = vm.refused("PUT", "/snapshot/load", load);
        assert!(after.contains("not supported after starting"), "{after}");
        let root = vm.dir().join("rootfs.ext4");
        pvmm_tests::guest::other_rootfs(&root);
        // The path is a symbolic link, like the paths of device mapper.
        let link = vm.dir().join("link");
        std::os::unix::fs::symlink(&root, &link).unwrap();
        let patch = json!({"drive_id": "rootfs", "path_on_host": link});
        limit("PATCH drives", vm.patch("/drives/rootfs", patch), 10_000.0, 1.0);
        // The first VM still has the volume of the snapshot open, so this VM gets another.
        let bigger = vm.dir().join("volume");
        std::fs::File::create(&bigger).unwrap().set_len(16 << 20).unwrap();
        vm.patch("/drives/vol1", json!({"drive_id": "vol1", "path_on_host": bigger}));
        limit("PATCH vm", vm.patch("/vm", json!({"state": "Resumed"})), 500.0, factor);
        assert_eq!(vm.prints("cat /tmp/word; sleep 0.5; cat /sys/block/vdb/size"), "baked\n32768");
        assert_eq!(vm.prints(pvmm_tests::guest::MARK_LINE), "other");
        assert_eq!(
            vm.prints("ls /bin | wc -l > /tmp/n; cat /sys/class/net/eth0/address"),
            "06:00:ac:10:00:02"
        );
        pvmm_tests::network::host(&["link", "show", "tap0"]);
        let tasks = std::fs::read_dir(format!("/proc/{}/task", vm.pid())).unwrap();
        let names =
            tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap());
        assert!(names.map(|name| name.trim_end().to_owned()).any(|name| name == "fc_vcpu 0"));
        let config = vm.get("/vm/config");
        assert_eq!(config["network-interfaces"][0]["host_dev_name"], "tap0");
        assert_eq!(config["boot-source"]["kernel_image_path"], "");
        let tx = json!({"bandwidth": {"size": 1_000_000, "refill_time": 100}});
        vm.patch("/network-interfaces/1", json!({"iface_id": "1", "tx_rate_limiter": tx}));
        vm.patch("/network-interfaces/1", json!({"iface_id": "1", "tx_rate_limiter": {}}));
        assert_eq!(
            vm.get("/vm/config")["network-interfaces"][0]["tx_rate_limiter"]["bandwidth"]["size"],
            1_000_000
        );
    });
}

/// Clients do nothing for it, and the guest cannot tell the loads apart.
#[test]
fn first_load_keeps_its_working_set_and_later_loads_prefault_it() {
    let vm = Firecracker::new();
    vm.describe();
    vm.start();
    vm.prints("echo baked > /tmp/word");
    let baked = Baked::of(vm);
    let kept = baked.dir.path().join("vm.state.working-set");
    let loaded = |more: Value| {
        let vm = Firecracker::with(&["--level", "Debug"]);
        let mut load = baked.load(&vm);
        load.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        vm.put("/snapshot/load", load);
        vm.patch("/vm", json!({"state": "Resumed"}));
        vm.agent();
        assert_eq!(vm.prints("cat /tmp/word"), "baked");
        vm
    };
    let tracked = loaded(json!({"track_dirty_pages": true}));
    let first = loaded(json!({}));
    first.until("the working set", |_| kept.exists().then_some(()));
    assert!(!first.console().contains("is prefaulted"), "{}", first.console());
    assert!(!tracked.console().contains("working set"), "{}", tracked.console());
    let bytes = std::fs::read(&kept).unwrap();
    for _ in 0..2 {
        let later = loaded(json!({}));
        assert!(later.console().contains("is prefaulted"), "{}", later.console());
        assert!(loaded(json!({"track_dirty_pages": true})).console().find("prefaulted").is_none());
    }
    assert_eq!(std::fs::read(&kept).unwrap(), bytes);
    // One that is damaged is not used, and replaced.
    std::fs::write(&kept, b"pvmm-ws1 and nothing else").unwrap();
    let repaired = loaded(json!({}));
    repaired.until("another one", |_| (std::fs::read(&kept).unwrap().len() > 100).then_some(()));
}

/// After a load that failed, the state of the process is unknown. The client gets the reason, and
/// the process ends.
#[test]
fn load_of_what_cannot_go_on_is_refused_and_ends_the_process() {
    let vm = Firecracker::new();
    vm.describe();
    vm.start();
    let running = json!({"snapshot_path": vm.dir().join("s"), "mem_file_path": vm.dir().join("m")});
    assert!(vm.refused("PUT", "/snapshot/create", running).contains("pause it first"));
    let baked = Baked::of(vm);

    let foreign = baked.dir.path().join("firecracker.state");
    std::fs::write(&foreign, [&0x0710_1984_8664_0000_u64.to_le_bytes()[..], &[0; 4096]].concat())
        .unwrap();
    let cut = baked.dir.path().join("cut.state");
    let state = std::fs::read(baked.state()).unwrap();
    std::fs::write(&cut, &state[..state.len() / 2]).unwrap();
    let broken: [(&str, Value); 4] = [
        ("snapshot_path", json!(foreign)),
        ("snapshot_path", json!(cut)),
        ("mem_file_path", json!("/no/such/memory")),
        ("network_overrides", json!([{"iface_id": "7", "host_dev_name": "tap0"}])),
    ];
    for (field, value) in broken {
        let mut vm = Firecracker::new();
        let mut load = baked.load(&vm);
        load[field] = value;
        let fault = vm.refused("PUT", "/snapshot/load", load);
        println!("{field}: {fault}");
        assert!(!fault.contains('\n') && fault.starts_with("Load snapshot error"), "{fault}");
        assert_eq!(vm.ends(), Some(1));
    }
    // A load that is refused before it begins leaves the process unchanged.
    let vm = Firecracker::new();
    vm.put("/machine-config", json!({"vcpu_count": 1, "mem_size_mib": 128}));
    let fault = vm.refused("PUT", "/snapshot/load", baked.load(&vm));
    assert!(fault.contains("not allowed after configuring boot-specific resources"), "{fault}");
    assert_eq!(vm.get("/")["state"], "Not started");
}

#[test]
fn snapshot_beside_an_unfinished_one_is_written() {
    let vm = Firecracker::new();
    vm.describe();
    vm.start();
    let baked = Baked::of(vm);
    let left = baked.leave_an_unfinished_folder();
    baked.save("Full");
    assert!(left.exists(), "a folder is removed by the next writer of a folder");
    baked.vm.patch("/vm", json!({"state": "Resumed"}));
    assert_eq!(baked.vm.prints("echo alive"), "alive");
}

#[test]
fn snapshot_of_differences_lies_over_the_whole_one() {
    let vm = Firecracker::new();
    vm.describe();
    let machine = json!({"vcpu_count": 1, "mem_size_mib": 128, "track_dirty_pages": true});
    vm.put("/machine-config", machine);
    vm.start();
    vm.prints("echo first > /tmp/word");
    let baked = Baked::of(vm);
    baked.vm.patch("/vm", json!({"state": "Resumed"}));
    baked.vm.prints("echo second > /tmp/word");
    baked.vm.patch("/vm", json!({"state": "Paused"}));
    baked.save("Diff");
    let vm = Firecracker::new();
    let mut load = baked.load(&vm);
    (load["resume_vm"], load["clock_realtime"]) = (json!(true), json!(true));
    vm.put("/snapshot/load", load);
    assert_eq!(vm.prints("cat /tmp/word"), "second");
}

#[test]
fn snapshot_goes_on_with_memory_from_a_page_server() {
    let vm = Firecracker::new();
    vm.describe();
    vm.start();
    vm.prints("echo served > /tmp/word");
    let baked = Baked::of(vm);
    let server = pvmm_tests::page_server::PageServer::start(&baked.memory());
    let mut vm = Firecracker::new();
    let backend = json!({"backend_type": "Uffd", "backend_path": server.socket()});
    let load = json!({"snapshot_path": baked.state(), "mem_backend": backend, "resume_vm": true,
                      "vsock_override": {"uds_path": vm.vsock()}});
    vm.put("/snapshot/load", load);
    assert_eq!(vm.prints("cat /tmp/word"), "served");
    assert!(server.served() > 100);
    drop(server);
    assert_eq!(vm.ends(), Some(1));
}

/// A shell line that prints the identity of a guest.
const IDS: &str = "cat /etc/machine-id /proc/sys/kernel/random/boot_id";

/// Requests that only pvmm has: drives in the load itself, forks of a running VM, and a rollback to
/// a checkpoint.
#[test]
fn machine_is_forked_while_it_runs_and_rolled_back() {
    let vm = Firecracker::new();
    vm.describe();
    vm.start();
    vm.prints("echo parent > /tmp/word");
    let mut ids = vec![vm.prints(IDS)];
    let socket = vm.dir().join("fork");
    let forked = vm.ask("PUT", "/pvmm/fork", &json!({"socket": socket, "children": 2}));
    assert_eq!(forked.status, 200, "{forked:?}");
    println!("pause of a fork: {} us", forked.body["pause_us"]);
    vm.prints("echo later > /tmp/word");
    let children: Vec<Firecracker> = (0..2).map(|_| Firecracker::new()).collect();
    for child in &children {
        child.put(
            "/pvmm/fork/load",
            json!({"socket": socket, "resume_vm": true,
                                            "vsock_override": {"uds_path": child.vsock()}}),
        );
        assert_eq!(child.prints("cat /tmp/word; echo child > /tmp/word"), "parent");
        ids.push(child.prints(IDS));
    }
    // Each fork has an identity of its own; the parent keeps its identity.
    assert_eq!(vm.prints(IDS), ids[0]);
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2], "{ids:?}");
    assert_eq!(vm.prints("cat /tmp/word"), "later");
    vm.until("the socket's end", |_| (!socket.exists()).then_some(()));

    assert!(vm.refused("PUT", "/pvmm/rollback", json!({})).contains("no checkpoint"));
    vm.put("/pvmm/checkpoint", json!({}));
    vm.prints("echo wrong > /tmp/word");
    vm.put("/pvmm/rollback", Value::Null);
    assert_eq!(vm.prints("cat /tmp/word"), "later");

    let baked = Baked::of(vm);
    let vm = Firecracker::new();
    let root = vm.dir().join("root");
    std::fs::copy(pvmm_tests::guest::base().rootfs, &root).unwrap();
    let mut load = baked.load(&vm);
    load["resume_vm"] = json!(true);
    let with = json!({"load": load,
                      "drive_overrides": [{"drive_id": "rootfs", "path_on_host": root}]});
    vm.put("/pvmm/snapshot/load", with);
    assert_eq!(vm.prints("cat /tmp/word"), "later");
    assert_eq!(vm.get("/vm/config")["drives"][0]["path_on_host"], json!(root));
}

#[test]
fn balloon_metadata_and_metrics_answer_as_clients_expect() {
    let vm = Firecracker::with(&["--mmds-size-limit", "200"]);
    vm.describe();
    let metrics = vm.dir().join("metrics");
    vm.put("/metrics", json!({"metrics_path": metrics}));
    vm.put(
        "/balloon",
        json!({"amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 1,
                              "free_page_hinting": true, "free_page_reporting": true}),
    );
    vm.put("/entropy", json!({"rate_limiter": {"bandwidth": {"size": 1000, "refill_time": 100}}}));
    vm.put("/mmds", json!({"latest": {"a": 1}}));
    vm.start();
    vm.patch("/balloon", json!({"amount_mib": 16}));
    let inflated = |vm: &Firecracker| {
        let stats = vm.get("/balloon/statistics");
        (stats["actual_mib"] == 16 && stats["free_memory"].is_u64()).then_some(())
    };
    vm.until("the balloon", inflated);
    assert_eq!(vm.get("/balloon")["amount_mib"], 16);
    vm.patch("/balloon/statistics", json!({"stats_polling_interval_s": 5}));
    vm.refused("PATCH", "/balloon/statistics", json!({"stats_polling_interval_s": 0}));
    vm.patch("/balloon/hinting/start", json!({"acknowledge_on_stop": true}));
    let hinted =
        |vm: &Firecracker| (vm.get("/balloon/hinting/status")["host_cmd"] == 1).then_some(());
    vm.until("the search for free pages", hinted);
    vm.patch("/balloon/hinting/stop", Value::Null);

    vm.patch("/mmds", json!({"latest": {"b": 2}}));
    assert_eq!(vm.get("/mmds"), json!({"latest": {"a": 1, "b": 2}}));
    assert_eq!(vm.ask("PUT", "/mmds", &json!({"x": "y".repeat(300)})).status, 413);

    vm.put("/actions", json!({"action_type": "FlushMetrics"}));
    let line = std::fs::read_to_string(metrics).unwrap();
    let line: Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
    assert_eq!(line["put_api_requests"]["boot_source_count"], 1);
    assert!(line["entropy"]["entropy_event_count"].is_u64(), "{line}");
}

/// A kernel of a few instructions that powers off when the first key is Control.
const WAITS_FOR_CTRL: [u8; 21] = [
    0xe4, 0x64, 0xa8, 0x01, 0x74, 0xfa, // again: in al, 0x64; test al, 1; jz again
    0xe4, 0x60, 0x3c, 0x14, 0x75, 0xfe, // in al, 0x60; cmp al, 0x14; jne self
    0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe, // power off
];

#[test]
fn ctrl_alt_del_reaches_the_keyboard_controller() {
    let mut vm = Firecracker::new();
    let before = vm.refused("PUT", "/actions", json!({"action_type": "SendCtrlAltDel"}));
    assert_eq!(before, "The requested operation is not supported before starting the microVM.");
    let kernel = pvmm_tests::tiny::kernel(&WAITS_FOR_CTRL);
    vm.put("/boot-source", json!({"kernel_image_path": kernel.path()}));
    vm.put("/actions", json!({"action_type": "InstanceStart"}));
    thread::sleep(Duration::from_millis(300));
    assert_eq!(vm.get("/")["state"], "Running");
    vm.put("/actions", json!({"action_type": "SendCtrlAltDel"}));
    assert_eq!(vm.ends(), Some(0));
}

/// A kernel that writes to the boot timer twice and powers off.
const SAYS_IT_BOOTED: [u8; 20] = [
    0xb8, 0x00, 0x00, 0x00, 0xc0, // mov eax, 0xc0000000
    0xc6, 0x00, 0x7b, 0xc6, 0x00, 0x7b, // mov byte [rax], 123, and again
    0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xeb, 0xfe, // power off
];

#[test]
fn boot_timer_logs_when_the_guest_says_that_it_has_booted() {
    let kernel = pvmm_tests::tiny::kernel(&SAYS_IT_BOOTED);
    for (flags, lines) in [(&["--boot-timer"][..], 1), (&[], 0)] {
        let mut vm = Firecracker::with(flags);
        vm.put("/boot-source", json!({"kernel_image_path": kernel.path()}));
        vm.put("/actions", json!({"action_type": "InstanceStart"}));
        assert_eq!(vm.ends(), Some(0));
        let told = vm.console().matches("Guest-boot-time = ").count();
        assert_eq!(told, lines, "{}", vm.console());
    }
}

#[test]
fn machine_in_a_file_starts_by_itself_and_ends_by_a_signal() {
    let dir = tempfile::TempDir::new().unwrap();
    let kernel = pvmm_tests::guest::default_kernel();
    std::fs::write(dir.path().join("initrd"), kernel.initramfs(pvmm_agent_image::AGENT).unwrap())
        .unwrap();
    let root = json!({"drive_id": "rootfs", "is_root_device": true, "is_read_only": true,
                      "path_on_host": pvmm_tests::guest::base().rootfs});
    let args = "console=ttyS0 quiet reboot=k panic=-1 pvmm.root=/dev/vda pvmm.rootfstype=ext4";
    let config = json!({
        "boot-source": {"kernel_image_path": kernel.vmlinux, "boot_args": args,
                        "initrd_path": dir.path().join("initrd")},
        "drives": [root], "machine-config": {"vcpu_count": 1, "mem_size_mib": 128},
        "vsock": {"guest_cid": 3, "uds_path": dir.path().join("v.sock")}, "later": null,
    });
    let (file, data) = (dir.path().join("vm.json"), dir.path().join("data.json"));
    std::fs::write(&file, config.to_string()).unwrap();
    std::fs::write(&data, r#"{"a": 1}"#).unwrap();
    let [file, data] = [file, data].map(|path| path.display().to_string());
    let mut vm = Firecracker::in_dir(dir, &["--config-file", &file, "--metadata", &data]);
    assert_eq!(vm.get("/")["state"], "Running");
    assert_eq!(vm.get("/mmds"), json!({"a": 1}));
    vm.agent();
    assert_eq!(vm.prints("echo up"), "up");
    vm.signal("TERM");
    assert_eq!(vm.ends(), None);

    let mut wrong = Firecracker::with_no_api(&["--config-file", "/no/such/file"]);
    assert_eq!(wrong.ends(), Some(1));
}

fn load_and_exec(times: usize) {
    let vm = Firecracker::new();
    vm.describe();
    vm.start();
    let baked = Baked::of(vm);
    let mut worst = Duration::ZERO;
    for round in 0..times {
        let begun = Instant::now();
        let vm = Firecracker::new();
        let load = baked.load(&vm);
        vm.put("/snapshot/load", load);
        vm.patch("/vm", json!({"state": "Resumed"}));
        // There is one attempt to connect, so that a vsock that fails after a load fails the test.
        let deadline = Instant::now() + Duration::from_secs(20);
        let agent = pvmm::agent::Agent::connect(vm.vsock(), deadline)
            .unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert_eq!(prints(&agent, "echo $((6 * 7))"), "42", "round {round}");
        worst = worst.max(begun.elapsed());
        if (round + 1).is_multiple_of(50) {
            println!("{} rounds", round + 1);
        }
    }
    println!("{times} loads with an exec each, none failed; the slowest took {worst:?}");
}

#[test]
fn load_and_exec_some_times_never_fails() {
    load_and_exec(8);
}

#[test]
#[ignore = "make soak"]
fn soak_firecracker_load_and_exec() {
    load_and_exec(1000);
}
