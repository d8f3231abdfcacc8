//! A VM in the jail that `pvmm-jailer` builds: it answers, it boots a guest, and it is confined as
//! requested.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm_agent_image::AGENT;
use pvmm_tests::cli;
use pvmm_tests::firecracker::{SOON, ask, prints};
use pvmm_tests::guest::{base, default_kernel};
use pvmm_tests::network::host;
use serde_json::{Value, json};
use tempfile::TempDir;

const USER: u32 = 1234;
const GROUP: u32 = 4321;
const NETNS: &str = "pvmm-jail";
const TAP: &str = "tap-jail";
const CGROUPS: &str = "/sys/fs/cgroup";

/// A folder outside the jail that is removed after the test, even if the test fails.
struct Outside {
    pid: Option<u32>,
    netns: Option<&'static str>,
}

impl Drop for Outside {
    fn drop(&mut self) {
        if let Some(pid) = self.pid {
            let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
        }
        if let Some(netns) = self.netns {
            let _ = Command::new("ip").args(["netns", "del", netns]).status();
        }
    }
}

fn until<T>(what: &str, act: impl Fn() -> Option<T>) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(found) = act() {
            return found;
        }
        assert!(Instant::now() < deadline, "waiting for {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Puts the files of the VM where a platform puts them: into the root of the jail, before the jail
/// exists. The libraries of a program that is not static go there too.
fn furnish(root: &Path, program: &Path) {
    fs::create_dir_all(root).unwrap();
    let kernel = default_kernel();
    fs::copy(&kernel.vmlinux, root.join("kernel")).unwrap();
    fs::write(root.join("initrd"), kernel.initramfs(AGENT).unwrap()).unwrap();
    fs::copy(base().rootfs, root.join("rootfs.ext4")).unwrap();
    for name in ["kernel", "initrd", "rootfs.ext4"] {
        chown(root.join(name), Some(USER), Some(GROUP)).unwrap();
    }
    let needed = Command::new("ldd").arg(program).output().unwrap();
    let needed = String::from_utf8_lossy(&needed.stdout).into_owned();
    for library in needed.split_whitespace().filter(|word| word.starts_with('/')) {
        let place = root.join(library.trim_start_matches('/'));
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::copy(library, place).unwrap();
    }
}

fn status(pid: u32, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn jailed_machine_answers_boots_and_is_confined() {
    let dir = TempDir::new().unwrap();
    let program = dir.path().join("firecracker");
    fs::copy(cli::binary(), &program).unwrap();
    let jailer = cli::binary().with_file_name("pvmm-jailer");
    let jails = dir.path().join("jails");
    let root = jails.join("firecracker/vm-1/root");
    furnish(&root, &program);
    host(&["netns", "add", NETNS]);
    let mut outside = Outside { pid: None, netns: Some(NETNS) };
    let user = USER.to_string();
    host(&["-n", NETNS, "tuntap", "add", "dev", TAP, "mode", "tap", "user", &user]);

    let jailed = Command::new(jailer)
        .args(["--id", "vm-1", "--uid", &user, "--gid", &GROUP.to_string(), "--exec-file"])
        .arg(&program)
        .arg("--chroot-base-dir")
        .arg(&jails)
        .args(["--netns", &format!("/var/run/netns/{NETNS}"), "--new-pid-ns", "--daemonize"])
        .args(["--cgroup-version", "2", "--parent-cgroup", "pvmm-jail"])
        .args(["--cgroup", "memory.max=1073741824", "--cgroup", "pids.max=200"])
        .args(["--resource-limit", "no-file=1000"])
        .args(["--", "--api-sock", "/run/api.sock"])
        .output()
        .unwrap();
    assert!(jailed.status.success(), "{jailed:?}");
    let pid = || fs::read_to_string(root.join("firecracker.pid")).ok()?.parse::<u32>().ok();
    let pid = until("the process", pid);
    outside.pid = Some(pid);
    let socket = root.join("run/api.sock");
    until("the socket", || UnixStream::connect(&socket).ok());
    boot(&socket);
    let connect = || {
        let deadline = Instant::now() + Duration::from_secs(5);
        Agent::connect(&root.join("run/v.sock"), deadline).ok()
    };
    let agent = until("the agent", connect);
    let line = "echo $((6 * 7)); cat /sys/class/net/eth0/address";
    assert_eq!(prints(&agent, line), "42\n06:00:00:00:00:01");

    let group = PathBuf::from(CGROUPS).join("pvmm-jail/vm-1");
    confined(pid, &root, &group);
    drop(agent);
    assert!(Command::new("kill").args(["-KILL", &pid.to_string()]).status().unwrap().success());
    outside.pid = None;
    let ended = || {
        let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        (text.is_empty() || text.contains("State:\tZ")).then_some(())
    };
    until("the end", ended);
    // Nothing uses the rest of the jail: it can be removed, and its mounts were never visible here.
    assert!(!fs::read_to_string("/proc/mounts").unwrap().contains("firecracker/vm-1"));
    until("an empty group", || fs::remove_dir(&group).ok());
    fs::remove_dir(group.parent().unwrap()).unwrap();
    host(&["netns", "del", NETNS]);
    outside.netns = None;
    fs::remove_dir_all(&jails).unwrap();
}

/// A jail as runtimes start it: daemonized, and with its whole configuration in a file. The
/// caller's umask and signal settings do not apply to the VM.
#[test]
fn daemonized_jail_with_a_config_file_boots_and_has_its_pid_in_the_root() {
    let dir = TempDir::new().unwrap();
    let program = dir.path().join("firecracker");
    fs::copy(cli::binary(), &program).unwrap();
    let jails = dir.path().join("jails");
    let root = jails.join("firecracker/vm-2/root");
    furnish(&root, &program);
    let args = "quiet reboot=k panic=-1 pvmm.root=/dev/vda pvmm.rootfstype=ext4";
    let config = json!({
        "boot-source": {"kernel_image_path": "kernel", "initrd_path": "initrd", "boot_args": args},
        "drives": [{"drive_id": "rootfs", "path_on_host": "rootfs.ext4", "is_root_device": true,
                    "is_read_only": true}],
        "machine-config": {"vcpu_count": 1, "mem_size_mib": 256},
        "vsock": {"guest_cid": 3, "uds_path": "/run/v.sock"}});
    fs::write(root.join("vm.json"), config.to_string()).unwrap();
    let jailed = Command::new("env")
        .args(["--block-signal=WINCH", "--ignore-signal=URG"])
        .args(["sh", "-c", "umask 0; exec \"$@\"", "sh"])
        .arg(cli::binary().with_file_name("pvmm-jailer"))
        .args(["--id", "vm-2", "--uid", &USER.to_string(), "--gid", &GROUP.to_string()])
        .arg("--exec-file")
        .arg(&program)
        .arg("--chroot-base-dir")
        .arg(&jails)
        .args(["--daemonize", "--harden", "--", "--config-file", "vm.json"])
        .output()
        .unwrap();
    assert!(jailed.status.success(), "{jailed:?}");
    let pid = || fs::read_to_string(root.join("firecracker.pid")).ok()?.parse::<u32>().ok();
    let pid = until("the process", pid);
    let mut outside = Outside { pid: Some(pid), netns: None };
    let connect = || {
        let deadline = Instant::now() + Duration::from_secs(5);
        Agent::connect(&root.join("run/v.sock"), deadline).ok()
    };
    let agent = until("the agent", connect);
    assert_eq!(prints(&agent, "echo $((6 * 7))"), "42");
    // The process in the file is the monitor process, and a daemon.
    assert_eq!(fs::read_link(format!("/proc/{pid}/exe")).unwrap().file_name(), program.file_name());
    assert_eq!(status(pid, "Uid"), format!("{USER} {USER} {USER} {USER}"));
    assert_eq!(status(pid, "PPid"), "1");
    assert_eq!(status(pid, "Umask"), "0077");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(pid, set), "0000000000000000", "{set}");
    }
    assert_eq!(status(pid, "NoNewPrivs"), "1");
    for name in ["mnt", "ipc", "uts", "cgroup"] {
        let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{name}")).unwrap();
        assert_ne!(of(&pid.to_string()), of("self"), "{name}");
    }
    let (winch, urg) = (1 << 27, 1 << 22);
    let signals = |field| u64::from_str_radix(&status(pid, field), 16).unwrap();
    assert_eq!((signals("SigBlk") & winch, signals("SigIgn") & urg), (0, 0));
    let socket = root.join("run/firecracker.socket");
    let reply = ask(UnixStream::connect(socket).unwrap(), "GET", "/", &Value::Null);
    assert_eq!(reply.body["state"], "Running");
    // A guest that ends by itself ends the process.
    let _ = agent.shutdown(pvmm::agent::ShutdownHow::Reboot, Some(Duration::from_secs(1)));
    let ended = || {
        let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        (text.is_empty() || text.contains("State:\tZ")).then_some(())
    };
    until("the end", ended);
    outside.pid = None;
}

/// Boots a VM from the files in the root of the jail.
fn boot(socket: &Path) {
    let put = |path: &str, body: Value| {
        let reply = ask(UnixStream::connect(socket).unwrap(), "PUT", path, &body);
        assert_eq!(reply.status, 204, "{path}: {reply:?}");
    };
    let args = "quiet reboot=k panic=-1 pvmm.root=/dev/vda pvmm.rootfstype=ext4";
    put(
        "/boot-source",
        json!({"kernel_image_path": "/kernel", "initrd_path": "/initrd", "boot_args": args}),
    );
    put(
        "/drives/rootfs",
        json!({"drive_id": "rootfs", "path_on_host": "/rootfs.ext4", "is_root_device": true,
               "is_read_only": true}),
    );
    put(
        "/network-interfaces/1",
        json!({"iface_id": "1", "host_dev_name": TAP, "guest_mac": "06:00:00:00:00:01"}),
    );
    put("/vsock", json!({"guest_cid": 3, "uds_path": "/run/v.sock"}));
    put("/actions", json!({"action_type": "InstanceStart"}));
}

/// Checks that everything that was requested is in effect.
fn confined(pid: u32, root: &Path, group: &Path) {
    assert_eq!(status(pid, "Uid"), format!("{USER} {USER} {USER} {USER}"));
    assert_eq!(status(pid, "Gid"), format!("{GROUP} {GROUP} {GROUP} {GROUP}"));
    assert_eq!(status(pid, "CapEff"), "0000000000000000");
    assert_eq!(status(pid, "NSpid"), format!("{pid} 1"));
    let network = |path: &str| fs::metadata(path).unwrap().ino();
    let here = network(&format!("/proc/{pid}/ns/net"));
    assert_eq!(here, network(&format!("/var/run/netns/{NETNS}")));
    assert_ne!(here, network("/proc/self/ns/net"));
    let inside = PathBuf::from(format!("/proc/{pid}/root"));
    assert!(inside.join("kernel").exists() && !inside.join("usr/bin").exists());
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert!(files.contains(" 1000 "), "{files}");
    let read = |name: &str| fs::read_to_string(group.join(name)).unwrap();
    assert_eq!((read("memory.max").trim(), read("pids.max").trim()), ("1073741824", "200"));
    assert!(read("cgroup.procs").lines().any(|line| line == pid.to_string()));
    for (name, device) in [("dev/kvm", true), ("dev/net/tun", true), ("run/api.sock", false)] {
        let facts = fs::symlink_metadata(root.join(name)).unwrap();
        assert_eq!((facts.uid(), facts.gid()), (USER, GROUP), "{name}");
        assert_eq!(facts.file_type().is_char_device(), device, "{name}");
    }
}
