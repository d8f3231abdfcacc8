//! Fork, snapshot, restore, checkpoint and rollback through the command line.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::thread;
use std::time::{Duration, Instant};

use pvmm_tests::cli::User;
use serde_json::Value;
use tempfile::TempDir;

#[test]
fn running_vm_is_forked_snapshotted_restored_and_taken_back() {
    let user = User::new();
    let vm = user.detached(&["--name", "web", "--cpus", "2"]);
    user.shell("web", "echo one > /root/word; echo $$ > /tmp/memory");

    // Two forks, each with its own state and name.
    let ids = user.ok(&["fork", "web", "-n", "2", "--name", "try"]);
    let ids: Vec<_> = ids.lines().collect();
    assert_eq!(ids.len(), 2);
    user.shell("try-1", "echo two > /root/word");
    assert_eq!(user.shell("try-2", "cat /root/word; hostname"), "one\ntry-2");
    let id_of = |vm: &str| user.shell(vm, "cat /etc/machine-id");
    assert_ne!(id_of("try-1"), id_of("try-2"));
    user.ok(&["kill", "--signal", "KILL", "try-2"]);

    // A fork of a fork, after its parent has ended.
    user.ok(&["fork", "try-1", "--name", "grandchild"]);
    user.ok(&["kill", "--signal", "KILL", "try-1"]);
    assert_eq!(user.shell("grandchild", "cat /root/word"), "two");
    user.ok(&["kill", "--signal", "KILL", "grandchild"]);

    // Checkpoint, change and rollback, twice.
    user.ok(&["checkpoint", "web"]);
    for _ in 0..2 {
        user.shell("web", "echo changed > /root/word; rm /tmp/memory; sync");
        user.ok(&["rollback", "web"]);
        assert_eq!(
            user.shell("web", "cat /root/word; test -s /tmp/memory && echo there"),
            "one\nthere"
        );
    }

    user.ok(&["pause", "web"]);
    assert!(user.ok(&["ps"]).contains("paused"));
    assert_eq!(user.pvmm(["exec", "web", "--", "true"]).code, Some(2));
    user.ok(&["resume", "web"]);

    // A snapshot on disk, restored after the VM has ended.
    let place = TempDir::new().unwrap();
    let path = place.path().join("web.snapshot");
    let path = path.to_str().unwrap();
    user.ok(&["snapshot", "web", path]);
    assert_eq!(user.pvmm(["snapshot", "web", path]).code, Some(2), "it exists already");
    let saved_id = id_of("web");
    user.ok(&["kill", "--signal", "KILL", &vm]);
    assert!(user.ok(&["snapshots", "inspect", path]).contains("\"memory_mib\": 512"));
    user.ok(&["restore", path, "--name", "back"]);
    assert_eq!(user.shell("back", "cat /root/word; nproc"), "one\n2");
    assert_ne!(id_of("back"), saved_id);
    user.ok(&["kill", "--signal", "KILL", "back"]);
    let missing = user.pvmm(["restore", "no-such-snapshot"]);
    assert_eq!((missing.code, missing.stderr.lines().count()), (Some(2), 1), "{missing:?}");
}

/// The signature covers the data in the folder, so 512 MiB of memory are signed and checked in the
/// time of their data.
#[test]
fn snapshot_with_a_key_is_restored_with_that_key_only() {
    let user = User::new();
    user.detached(&["--name", "web", "--cpus", "2"]);
    user.shell("web", "echo signed > /root/word");
    let place = TempDir::new().unwrap();
    let path = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    for (name, byte) in [("right", 1u8), ("wrong", 2)] {
        fs::write(path(name), [byte; 32]).unwrap();
        fs::set_permissions(path(name), Permissions::from_mode(0o600)).unwrap();
    }
    user.ok(&["snapshot", "web", &path("signed"), "--key", &path("right")]);
    user.ok(&["snapshot", "web", &path("plain")]);
    user.ok(&["kill", "--signal", "KILL", "web"]);

    for (snapshot, key) in [("signed", "wrong"), ("plain", "right")] {
        let said = user.pvmm(["restore", &path(snapshot), "--key", &path(key)]);
        assert_eq!((said.code, said.stderr.lines().count()), (Some(2), 1), "{said:?}");
        assert!(said.stderr.contains("signature"), "{said:?}");
    }
    assert_eq!(user.ok(&["ps", "--quiet"]), "");
    user.ok(&["restore", &path("signed"), "--key", &path("right"), "--name", "back"]);
    assert_eq!(user.shell("back", "cat /root/word"), "signed");
    user.ok(&["kill", "--signal", "KILL", "back"]);
}

#[test]
fn warm_template_runs_without_a_boot_and_every_run_is_its_own() {
    let user = User::new();
    user.ok(&["template", "bake", "base"]);
    let line = "cat /proc/sys/kernel/random/boot_id; cat /root/word; echo mine > /root/word";
    let mut seen: Vec<_> = (0..5).map(|_| user.ok(&["run", "--", "sh", "-c", line])).collect();
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 5, "{seen:?}");
    assert!(seen.iter().all(|text| text.lines().count() == 1), "a run sees no other: {seen:?}");
    // No two boots leave the same instants in the kernel's log.
    let boot = |how: &[&str]| user.ok(&[how, &["--", "dmesg"]].concat());
    let first_lines = |log: String| log.lines().take(20).collect::<Vec<_>>().join("\n");
    let warm = first_lines(boot(&["run"]));
    assert!(warm.contains("Linux version"), "{warm}");
    assert_eq!(warm, first_lines(boot(&["run"])));
    assert_ne!(warm, first_lines(boot(&["run", "--cold"])));
    assert_eq!(user.pvmm(["run", "--", "sh", "-c", "exit 7"]).code, Some(7));
    let ids = user.ok(&["fork", "base", "-n", "2"]);
    let ids: Vec<_> = ids.lines().collect();
    user.ok(&["kill", "--signal", "KILL", ids[0], ids[1]]);
}

/// Returns the private memory of the process that runs a VM, in MiB.
fn private_mib(user: &User, vm: &str) -> u64 {
    let listed = user.pvmm(["ps", "--json"]);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let row = listed.as_array().unwrap().iter().find(|row| row["id"] == vm).unwrap();
    let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", row["pid"])).unwrap();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Private_Dirty:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() >> 10
}

#[test]
fn vm_that_was_forked_shares_its_memory_with_its_forks() {
    let user = User::new();
    let vm = user.detached(&["--memory", "512M"]);
    let sum = user.shell(&vm, "head -c 128M /dev/urandom > /dev/shm/x; md5sum < /dev/shm/x");
    assert!(private_mib(&user, &vm) > 128, "the memory is its own");
    let fork = user.ok(&["fork", &vm]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while private_mib(&user, &vm) > 32 {
        assert!(Instant::now() < deadline, "{} MiB are private", private_mib(&user, &vm));
        thread::sleep(Duration::from_millis(200));
    }
    let change = "head -c 1M /dev/zero | dd of=/dev/shm/x conv=notrunc status=none";
    let changed = user.shell(&vm, &format!("{change}; md5sum < /dev/shm/x"));
    assert_ne!(changed, sum);
    // A second fork copies only what was written since.
    let second = user.ok(&["fork", &vm]);
    let sums = [&vm, &fork, &second].map(|vm| user.shell(vm, "md5sum < /dev/shm/x"));
    assert_eq!(sums, [&changed, &sum, &changed].map(String::as_str));
    user.ok(&["kill", "--signal", "KILL", &vm, &fork, &second]);
}
