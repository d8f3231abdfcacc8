//! The jail around the process of a VM: each layer is there, nothing of it is left behind, and
//! nothing that the process writes is trusted outside.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use pvmm_tests::cli::{self, User};
use pvmm_tests::guest;
use serde_json::Value;

const SOON: Duration = Duration::from_secs(40);
/// The first and the last user that VMs get.
const USERS: std::ops::RangeInclusive<u32> = 1_900_000_000..=1_900_065_535;
const NOBODY: u32 = 65534;

fn soon(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < deadline, "waiting for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The process that runs a VM.
struct Process {
    pid: u32,
}

impl Process {
    fn of(user: &User, vm: &str) -> Self {
        let listed: Value = serde_json::from_slice(&user.pvmm(["ps", "--json"]).stdout).unwrap();
        let row = listed.as_array().unwrap().iter().find(|row| row["id"] == vm).unwrap();
        Self { pid: row["pid"].as_u64().unwrap() as u32 }
    }

    fn file(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.pid))
    }

    fn status(&self, field: &str) -> String {
        let text = fs::read_to_string(self.file("status")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
        line.unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn limit(&self, name: &str) -> String {
        let text = fs::read_to_string(self.file("limits")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    }

    fn parent(&self) -> u32 {
        self.status("PPid").parse().unwrap()
    }

    fn is_there(&self) -> bool {
        self.file("exe").symlink_metadata().is_ok()
    }
}

fn kill(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}

#[test]
fn vm_process_has_no_privilege_and_a_user_of_its_own() {
    let user = User::new();
    let (one, two) = (user.detached(&[]), user.detached(&[]));
    let uids = [&one, &two].map(|vm| {
        let process = Process::of(&user, vm);
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(process.status(set), "0000000000000000", "{set}");
        }
        assert_eq!(
            (process.status("NoNewPrivs"), process.status("Groups")),
            ("1".into(), "".into())
        );
        let ids: Vec<u32> = ["Uid", "Gid"]
            .iter()
            .flat_map(|name| {
                let ids = process.status(name);
                ids.split(' ').map(|id| id.parse().unwrap()).collect::<Vec<u32>>()
            })
            .collect();
        assert!(ids.iter().all(|id| *id == ids[0] && USERS.contains(id)), "{ids:?}");
        assert_eq!(process.status("NSpid").split(' ').nth(1), Some("1"));
        ids[0]
    });
    assert_ne!(uids[0], uids[1]);
    user.pvmm(["kill", &one, &two]);
}

#[test]
fn k5_vm_process_sees_two_folders_of_the_host_and_shares_no_namespace_with_it() {
    let user = User::new();
    let vm = user.detached(&[]);
    let process = Process::of(&user, &vm);
    let mounts = fs::read_to_string(process.file("mountinfo")).unwrap();
    let mut mounts: Vec<_> = mounts
        .lines()
        .map(|line| line.split(' ').skip(4).take(2).collect::<Vec<_>>().join(" "))
        .collect();
    mounts.sort();
    let flags = "nosuid,nodev,noexec,relatime";
    let expected =
        [format!("/ ro,{flags}"), format!("/scratch rw,{flags}"), format!("/vm rw,{flags}")];
    assert_eq!(mounts, expected);
    for name in ["pid", "mnt", "net", "ipc", "uts", "cgroup"] {
        let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{name}")).unwrap();
        assert_ne!(of(&process.pid.to_string()), of("self"), "{name}");
    }
    for entry in fs::read_dir(process.file("fd")).unwrap().flatten() {
        let is_folder = fs::metadata(entry.path()).is_ok_and(|facts| facts.is_dir());
        assert!(!is_folder, "{:?} is open", fs::read_link(entry.path()));
    }
    assert!(fs::read(process.file("environ")).unwrap().iter().all(|byte| *byte == 0));
    user.pvmm(["kill", &vm]);
}

#[test]
fn vm_process_is_limited_by_rlimits_and_by_a_control_group_that_goes_with_it() {
    let user = User::new();
    let vm = user.detached(&["--memory", "256M"]);
    let process = Process::of(&user, &vm);
    for (name, limit) in [
        ("Max core file size", "0"),
        ("Max open files", "8192"),
        ("Max locked memory", "8388608"),
        ("Max processes", "257"),
    ] {
        assert_eq!(process.limit(name), limit, "{name}");
    }
    assert_ne!(process.limit("Max address space"), "unlimited");
    let group = Path::new("/sys/fs/cgroup/pvmm").join(&vm);
    let read = |name: &str| fs::read_to_string(group.join(name)).unwrap().trim().to_owned();
    assert_eq!(read("memory.max"), ((2 * 256 + 256) << 20).to_string());
    assert_eq!((read("memory.oom.group"), read("pids.max")), ("1".into(), "257".into()));
    assert_eq!((read("cpu.max"), read("cpu.weight")), ("200000 100000".into(), "100".into()));
    assert_eq!(read("cgroup.procs"), process.pid.to_string());
    user.pvmm(["kill", &vm]);
    assert!(!group.exists());
}

#[test]
fn l2_vm_that_takes_more_memory_than_its_group_may_ends_and_says_so() {
    let user = User::new();
    let vm = user.detached(&["--memory", "256M"]);
    let group = Path::new("/sys/fs/cgroup/pvmm").join(&vm);
    fs::write(group.join("memory.max"), (96 << 20).to_string()).unwrap();
    let fill = "head -c 150M /dev/urandom > /dev/shm/x";
    assert_eq!(user.pvmm(["exec", &vm, "--", "sh", "-c", fill]).code, Some(125));
    soon("the end", || user.pvmm(["ps", "--json"]).text().contains("oom"));
    user.pvmm(["rm", &vm]);
}

#[test]
fn l9_vm_ends_with_its_supervisor_and_its_supervisor_cleans_up_after_it() {
    let user = User::new();
    let vm = user.detached(&[]);
    let process = Process::of(&user, &vm);
    kill(process.parent());
    soon("the end of the VM", || !process.is_there());
    assert!(user.pvmm(["ps"]).text().contains("dead"));
    user.pvmm(["rm", &vm]);
    // The monitor process alone: its supervisor notices, and removes its sockets and its group.
    let vm = user.detached(&[]);
    let process = Process::of(&user, &vm);
    let supervisor = Process { pid: process.parent() };
    kill(process.pid);
    soon("the end of the supervisor", || !supervisor.is_there());
    assert!(!user.runtime().join(&vm).join("run/vsock.sock").exists());
    assert!(!Path::new("/sys/fs/cgroup/pvmm").join(&vm).exists());
    user.pvmm(["rm", &vm]);
}

#[test]
fn vm_of_a_foreground_run_whose_launcher_is_killed_leaves_nothing() {
    let user = User::new();
    let mut run = user.spawn(["run", "--", "sleep", "1000"]);
    let running = || user.pvmm(["ps"]).text().contains("running");
    soon("the VM", running);
    run.kill().unwrap();
    run.wait().unwrap();
    // No command is needed for that.
    soon("the end of everything", || !user.runtime().exists());
}

#[test]
fn l12_vm_with_a_time_to_live_ends_when_it_has_passed_even_if_its_process_hangs() {
    let user = User::new();
    let vm = user.detached(&["--ttl", "15s"]);
    let ended = || user.pvmm(["ps", "--json"]).text().contains("(ttl)");
    soon("the end", ended);
    user.pvmm(["rm", &vm]);
    // The supervisor has the last word over a process that does not end the VM itself.
    let vm = user.detached(&["--ttl", "15s"]);
    let process = Process::of(&user, &vm);
    let stopped = Command::new("kill").args(["-STOP", &process.pid.to_string()]).status();
    assert!(stopped.unwrap().success());
    soon("the end", ended);
    assert!(!process.is_there());
    user.pvmm(["rm", &vm]);
}

#[test]
fn launcher_follows_no_link_that_a_vm_process_could_make() {
    let user = User::new();
    let vm = user.detached(&[]);
    let log = user.runtime().join(&vm).join("run/console.log");
    fs::remove_file(&log).unwrap();
    symlink("/etc/passwd", &log).unwrap();
    let said = user.pvmm(["logs", "--console", &vm]);
    assert!(said.code != Some(0) && !said.text().contains("root:"), "{said:?}");
    user.pvmm(["kill", &vm]);
}

#[test]
fn vm_without_a_jail_is_said_aloud() {
    let user = User::new();
    let said = user.pvmm(["run", "--no-jail", "--", "true"]);
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(said.stderr.contains("no jail"), "{}", said.stderr);
    assert_eq!(user.pvmm(["run", "--", "true"]).stderr, "");
}

#[test]
fn vm_of_root_without_namespaces_runs_and_says_what_its_jail_lacks() {
    let user = User::new();
    assert_eq!(user.pvmm(["template", "bake", "base"]).code, Some(0));
    for words in [&["run", "--cold"][..], &["run"]] {
        let said = Command::new("setpriv")
            .args(["--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"])
            .arg(cli::binary())
            .args(words)
            .args(["--", "echo", "through"])
            .env("PVMM_RUNTIME_DIR", user.runtime())
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&said.stdout), "through\n", "{said:?}");
        let lacks = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(lacks.contains("lacks: ") && lacks.contains("user of its own"), "{lacks}");
    }
}

/// Runs the attempts of the example `confined`, as root or as a user without privileges.
fn attempts(as_root: bool, words: &[&str]) -> String {
    let place = tempfile::tempdir().unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let owner = if as_root { *USERS.start() } else { NOBODY };
    let folders = ["folder", "scratch"].map(|name| place.path().join(name));
    for folder in &folders {
        fs::create_dir(folder).unwrap();
        chown(folder, Some(owner), Some(owner)).unwrap();
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let program = place.path().join("confined");
    fs::copy(cli::built("examples").join("confined"), &program).unwrap();
    let mut command = Command::new("setpriv");
    if !as_root {
        let id = NOBODY.to_string();
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups"]);
    }
    command.arg(&program).args(words).args(&folders).arg(owner.to_string()).arg(port);
    let output = command.output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn k12_confined_process_can_do_what_it_must_and_nothing_else() {
    let allowed = ["write a file in its folder: done", "make a nameless file in scratch: done"];
    let refused = [
        "make a named file in scratch: PermissionDenied",
        "make a folder in its folder: PermissionDenied",
        "make a link in its folder: PermissionDenied",
        "read a file of the host: NotFound",
        "list processes: NotFound",
        "open a device: NotFound",
        "make a file in the root: ReadOnlyFilesystem",
        "listen on TCP: PermissionDenied",
        "connect to the host: PermissionDenied",
        "run a program: NotFound",
        "open many files: Uncategorized",
        "read its environment: Other",
    ];
    let unconfined = attempts(true, &["--unconfined"]);
    assert_eq!(unconfined.matches(": done").count(), allowed.len() + refused.len());
    let all = [&allowed[..], &refused].concat().join("\n");
    assert_eq!(attempts(true, &[]).trim_end(), all);
    assert_eq!(attempts(false, &[]).trim_end(), format!("lacks user of its own\n{all}"));
}

#[test]
fn k11_vm_of_an_ordinary_user_gets_every_layer_but_those_that_take_root() {
    let user = User::ordinary();
    let kernel = user.brings(&guest::default_kernel().vmlinux);
    let rootfs = user.brings(&guest::base().rootfs);
    let said = user.pvmm(["run", "-d", "--kernel", &kernel, "--rootfs", &rootfs]);
    let lacks = "the jail lacks: user of its own (it takes root)";
    assert!(said.stderr.contains(lacks), "{said:?}");
    let listed: Value = serde_json::from_str(&user.ok(&["ps", "--json"])).unwrap();
    let process = Process { pid: listed[0]["pid"].as_u64().unwrap() as u32 };
    assert_eq!(process.status("CapEff"), "0000000000000000");
    assert_eq!(fs::read_to_string(process.file("mountinfo")).unwrap().lines().count(), 3);
    for name in ["user", "pid", "mnt", "net", "ipc", "uts"] {
        let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{name}")).unwrap();
        assert_ne!(of(&process.pid.to_string()), of("self"), "{name}");
    }
    user.ok(&["kill", said.text()]);
}
