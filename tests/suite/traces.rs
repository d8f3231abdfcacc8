//! VMs with a jail and a network leave nothing behind: after many of them, and after each of their
//! processes was killed at any of its system calls.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pvmm_tests::cli::{self, User};
use pvmm_tests::internet::{Internet, RESOLVER, SERVER};
use pvmm_tests::network;

/// How long something that ends in the background may take.
const SOON: Duration = Duration::from_secs(20);
/// After so many forks the layers of a VM's memory and disks are merged, not added to.
const SETTLED: usize = 40;

/// Lists the host's namespaces, interfaces, mounts, control groups, and processes of pvmm.
pub fn census() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let comm = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        if comm.starts_with("pvmm") {
            all.insert(format!("process {}", comm.trim_end()));
        }
        for namespace in fs::read_dir(process.path().join("ns")).into_iter().flatten().flatten() {
            let link = fs::read_link(namespace.path()).unwrap_or_default();
            all.insert(format!("namespace {}", link.display()));
        }
    }
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    all.extend(mounts.lines().map(|line| format!("mount {line}")));
    for (kind, folder) in [("interface", "/sys/class/net"), ("group", "/sys/fs/cgroup/pvmm")] {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            all.insert(format!("{kind} {}", entry.file_name().display()));
        }
    }
    all
}

/// Waits until nothing is there that was not there before.
pub fn is_clean(before: &BTreeSet<String>, what: &str) {
    let deadline = Instant::now() + SOON;
    loop {
        let left: Vec<_> = census().difference(before).cloned().collect();
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: {left:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Counts the descriptors, threads and MiB of memory of all processes of pvmm.
fn held() -> [usize; 3] {
    let mut held = [0; 3];
    for process in fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path()) {
        let Ok(status) = fs::read_to_string(process.join("status")) else { continue };
        if !status.starts_with("Name:\tpvmm") {
            continue;
        }
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
        };
        let descriptors = fs::read_dir(process.join("fd")).map_or(0, Iterator::count);
        let more = [descriptors, value("Threads:"), value("RssAnon:") >> 10];
        held.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
    held
}

/// Makes a VM, or a fork of the one that stays, runs a command that uses the network in it, and
/// ends it, `count` times.
fn cycles(count: usize, forks: bool) {
    network::isolated(|| {
        let internet = Internet::new(&[("example.test", SERVER)]);
        let user = User::new();
        let baked = user.pvmm(["template", "bake", "-q", "--net"]);
        assert_eq!(baked.code, Some(0), "{baked:?}");
        let policy = ["--allow-host", "example.test", "--resolver", RESOLVER];
        let stays = user.detached(&policy);
        let before = census();
        let line = "exec 3<>/dev/tcp/example.test/80; printf 'GET / HTTP/1.0\\r\\n\
                    Host: example.test\\r\\n\\r\\n' >&3; read -r line <&3; echo $line";
        let mut most = [0; 3];
        for number in 0..count {
            let vm = if forks {
                let fork = user.pvmm(["fork", &stays]);
                assert_eq!(fork.code, Some(0), "{fork:?}");
                fork.text().to_owned()
            } else {
                user.detached(&policy)
            };
            let said = user.pvmm(["exec", &vm, "--", "bash", "-c", line]);
            assert!(said.text().contains(" 200 "), "{said:?}");
            assert_eq!(user.pvmm(["kill", "--signal", "KILL", &vm]).code, Some(0));
            is_clean(&before, &format!("after {number} cycles"));
            let now = held();
            if number < SETTLED {
                most.iter_mut().zip(now).for_each(|(most, now)| *most = (*most).max(now));
            } else {
                assert!(now.iter().zip(most).all(|(now, most)| *now <= most), "{most:?} {now:?}");
            }
            if number % 100 == SETTLED {
                println!("after {number} cycles: {now:?} descriptors, threads, MiB of memory");
            }
        }
        println!("traces: {count} cycles, {} requests", internet.seen().len());
        assert_eq!(user.pvmm(["kill", &stays]).code, Some(0));
    });
}

#[test]
fn jailed_and_networked_vms_come_and_go_without_a_trace() {
    cycles(5, false);
}

#[test]
fn jailed_and_networked_forks_come_and_go_without_a_trace() {
    cycles(5, true);
}

#[test]
#[ignore = "make soak"]
fn soak_two_thousand_jailed_and_networked_vms_leave_no_trace() {
    cycles(2000, false);
}

#[test]
#[ignore = "make soak"]
fn soak_two_thousand_jailed_and_networked_forks_leave_no_trace() {
    cycles(2000, true);
}

/// Runs a VM with a network; launcher, supervisor, egress and monitor process are each killed at
/// their `number`th system call. Returns whether that was before the command's end.
fn killed_at(user: &User, number: usize) -> bool {
    let run = ["run", "-q", "--cold", "--net", "--", "echo", "through"];
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=all", "-e"]);
    command.arg(format!("inject=all:signal=KILL:when={number}"));
    command.arg(cli::binary()).args(run).stdin(Stdio::null()).stderr(Stdio::null());
    command.env("PVMM_RUNTIME_DIR", user.runtime()).env("PVMM_BOOT_TIMEOUT", "120s");
    let output = command.output().unwrap();
    !String::from_utf8_lossy(&output.stdout).contains("through")
}

fn killed_at_each(numbers: impl Iterator<Item = usize>) {
    let user = User::new();
    let before = census();
    let mut killed = 0;
    for number in numbers {
        let cut_short = killed_at(&user, number);
        killed += usize::from(cut_short);
        // What a process that was killed could not remove, the next command does.
        assert_eq!(user.pvmm(["ps", "-q"]).code, Some(0));
        is_clean(&before, &format!("killed at call {number}"));
        let left = fs::read_dir(user.runtime()).map_or(0, Iterator::count);
        assert_eq!(left, 0, "killed at call {number}: {}", user.runtime().display());
        if !cut_short {
            break;
        }
    }
    println!("traces: {killed} runs were killed, each process at one system call");
}

#[test]
fn l8_run_whose_processes_are_killed_at_some_system_call_leaves_nothing() {
    killed_at_each([30, 75, 110, 150, 190, 240, 300].into_iter());
}

#[test]
#[ignore = "make soak"]
fn soak_run_whose_processes_are_killed_at_any_system_call_leaves_nothing() {
    // Each of the calls that set a process up, then every third until the command ends before it.
    killed_at_each((1..400).chain((400..).step_by(3)));
}
