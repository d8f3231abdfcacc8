//! Snapshots of disks alone: the files are kept, memory and processes are not, and a restore boots.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use pvmm_tests::cli::{Said, User};
use pvmm_tests::network;
use tempfile::TempDir;

/// Prints the identity of a guest: hostname, machine-id, boot-id.
const IDENTITY: &str = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id";
/// Counts the processes that the test has started.
const SLEEPS: &str =
    "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '^[9]8765$' || true";

fn kill(user: &User, vms: &[&str]) {
    user.ok(&[&["kill", "--signal", "KILL"], vms].concat());
}

/// Checks that a command was refused in one line with these words.
fn refused(said: &Said, words: &[&str]) {
    assert_eq!(said.code, Some(2), "{said:?}");
    let first = said.stderr.lines().next().unwrap_or_default();
    assert!(words.iter().all(|word| first.contains(word)), "{words:?}: {said:?}");
}

/// A folder for snapshots of a test.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }
}

fn disk_bytes(folder: &str) -> u64 {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512).sum()
}

#[test]
fn vm_restored_from_disks_alone_has_the_files_and_boots_as_a_new_machine() {
    let (user, place) = (User::new(), Place::new());
    let (disks, all) = (place.path("disks"), place.path("all"));
    user.detached(&["--name", "web", "--memory", "384M"]);
    // Written last and never synced; and a process that writes on.
    let busy = "mkdir -p /data; echo kept > /data/f; \
                (while :; do date >> /data/log; sleep 0.1; done) >/dev/null 2>&1 </dev/null & \
                sleep 98765 >/dev/null 2>&1 </dev/null &";
    user.shell("web", busy);
    user.shell("web", "echo unsynced > /root/last");
    let said = user.ok(&["snapshot", "web", &disks, "--disk-only", "--json"]);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&said["kind"], &said["memory_mib"]), (&"disk".into(), &384.into()), "{said}");
    user.ok(&["snapshot", "web", &all]);
    assert!(!Path::new(&disks).join("memory.bin").exists());
    assert!(
        disk_bytes(&disks) * 2 < disk_bytes(&all),
        "{} {}",
        disk_bytes(&disks),
        disk_bytes(&all)
    );
    // The original runs on, its process included.
    user.shell("web", "a=$(wc -l < /data/log); sleep 2; test $(wc -l < /data/log) -gt $a");
    user.shell("web", "echo later > /data/f");

    user.ok(&["restore", &disks, "--name", "again"]);
    assert_eq!(user.shell("again", "cat /data/f /root/last"), "kept\nunsynced");
    assert_eq!((user.shell("web", SLEEPS), user.shell("again", SLEEPS)), ("1".into(), "0".into()));
    let (one, two) = (user.shell("web", IDENTITY), user.shell("again", IDENTITY));
    let pairs = one.lines().zip(two.lines());
    assert!(two.starts_with("again\n") && pairs.clone().count() == 3, "{two}");
    assert!(pairs.clone().all(|(one, two)| one != two), "{one} {two}");
    let kernel = "uname -r";
    assert_eq!(user.shell("web", kernel), user.shell("again", kernel));
    // It is a VM like any other: it writes, forks and is written to disk again.
    user.shell("again", "echo more > /data/f");
    user.ok(&["fork", "again", "--name", "fork"]);
    assert_eq!(user.shell("fork", "cat /data/f"), "more");
    let second = place.path("second");
    user.ok(&["snapshot", "again", &second, "--disk-only"]);
    kill(&user, &["web", "again", "fork"]);

    // Several at once, in another size, from a snapshot of a VM that came from a snapshot.
    let words = ["restore", &second, "-n", "2", "--name", "n", "--memory", "256M", "--cpus", "2"];
    user.ok(&words);
    let ids: BTreeSet<_> = ["n-1", "n-2"].map(|vm| user.shell(vm, IDENTITY)).into();
    assert_eq!(ids.len(), 2);
    assert_eq!(user.shell("n-1", "echo own > /data/f; nproc"), "2");
    assert_eq!(user.shell("n-2", "cat /data/f"), "more");
    kill(&user, &["n-1", "n-2"]);
}

#[test]
fn snapshot_of_disks_alone_is_listed_signed_and_refused_with_flags_that_make_no_sense() {
    let (user, place) = (User::new(), Place::new());
    let data = place.path("data");
    let pvmm = |args: &[&str]| {
        let output = user.command(args).env("XDG_DATA_HOME", &data).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Said { code: output.status.code(), stdout: output.stdout, stderr, took: Default::default() }
    };
    let good = |args: &[&str]| {
        let said = pvmm(args);
        assert_eq!(said.code, Some(0), "pvmm {args:?}: {said:?}");
        said.text().to_owned()
    };
    let vm = user.detached(&["--name", "web"]);
    let key = place.path("key");
    fs::write(&key, [5; 64]).unwrap();
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    good(&["snapshot", &vm, "files", "--disk-only", "--key", &key]);
    good(&["snapshot", &vm, "all"]);
    let listed = good(&["snapshots"]);
    let row = |name: &str| listed.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(row("files").contains("disk") && row("all").contains("memory"), "{listed}");
    let rows: serde_json::Value = serde_json::from_str(&good(&["snapshots", "--json"])).unwrap();
    assert_eq!((&rows[0]["kind"], &rows[1]["kind"]), (&"memory".into(), &"disk".into()), "{rows}");
    let shown = good(&["snapshots", "inspect", "files"]);
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    assert_eq!((&shown["kind"], &shown["machine"]["vcpus"]), (&"disk".into(), &1.into()));

    refused(&pvmm(&["snapshot", &vm, "x", "--disk-only", "--incremental"]), &["--incremental"]);
    refused(&pvmm(&["restore", "all", "--memory", "1G"]), &["--memory", "with memory"]);
    refused(&pvmm(&["restore", "all", "--kernel", "/x"]), &["--kernel"]);
    refused(&pvmm(&["restore", "files", "--drive", "vdb=/etc/hosts"]), &["--drive"]);
    refused(&pvmm(&["restore", "files", "--drive", "vdc=/etc/hosts"]), &["--drive"]);
    refused(&pvmm(&["restore", "files", "--kernel", "/nowhere"]), &["/nowhere"]);
    refused(&pvmm(&["restore", "files", "--net", "tap=a", "--net", "tap=b"]), &["--net"]);
    fs::write(&key, [6; 64]).unwrap();
    refused(&pvmm(&["restore", "files", "--key", &key]), &["signature"]);
    fs::write(&key, [5; 64]).unwrap();
    good(&["restore", "files", "--key", &key, "--name", "signed", "--verify"]);
    assert_eq!(user.shell("signed", "hostname"), "signed");
    good(&["snapshots", "rm", "files", "all"]);
    kill(&user, &[&vm, "signed"]);
}

#[test]
fn disks_alone_boot_only_with_the_kernel_of_their_vm_or_one_that_is_given() {
    let (user, place) = (User::new(), Place::new());
    let cache = pvmm_images::Cache::open().unwrap();
    let own = pvmm_images::Kernel::default_file(&cache).unwrap();
    let kernel = place.path("vmlinux-of-web");
    fs::copy(own, &kernel).unwrap();
    let folder = place.path("snap");
    user.detached(&["--name", "web", "--kernel", &kernel]);
    user.ok(&["snapshot", "web", &folder, "--disk-only"]);
    kill(&user, &["web"]);
    refused(&user.pvmm(["restore", &folder]), &["vmlinux-of-web", "folder"]);
    let allowed = ["restore", &folder, "--allow-files", place.0.path().to_str().unwrap()];
    user.ok(&[&allowed[..], &["--name", "same"]].concat());
    fs::rename(&kernel, place.path("moved")).unwrap();
    refused(&user.pvmm(allowed), &["vmlinux-of-web", "gone"]);
    let moved = place.path("moved");
    user.ok(&["restore", &folder, "--kernel", &moved, "--name", "other"]);
    kill(&user, &["same", "other"]);
}

#[test]
fn vm_booted_from_disks_has_the_card_and_the_drives_that_it_had_or_is_given() {
    network::isolated(|| {
        let (user, place) = (User::new(), Place::new());
        let (image, folder) = (place.path("more.img"), place.path("snap"));
        fs::write(&image, vec![b'a'; 1 << 20]).unwrap();
        let card = ["--net", "tap=t0,ip=10.9.0.2/24"];
        user.detached(&[&["--name", "web", "--drive", &image], &card[..]].concat());
        user.ok(&["snapshot", "web", &folder, "--disk-only"]);
        let first = "head -c 1 /dev/vdc; cat /sys/class/net/eth0/operstate >/dev/null";
        user.shell("web", "printf b | dd of=/dev/vdc conv=notrunc 2>/dev/null; sync");
        let again = ["restore", &folder, "--name", "again", "--net", "tap=t1,ip=10.9.1.2/24"];
        user.ok(&again);
        assert_eq!(user.shell("again", first), "a");
        let address = "busybox ip -o addr show dev eth0 | grep -c 10.9.1.2/24";
        assert_eq!(user.shell("again", address), "1");
        kill(&user, &["web", "again"]);
    });
}

#[test]
fn vm_with_a_volume_is_not_written_as_disks_alone_and_a_killed_writer_leaves_nothing() {
    let (user, place) = (User::new(), Place::new());
    let data = place.path("data");
    let run = |args: &[&str]| user.command(args).env("XDG_DATA_HOME", &data).output().unwrap();
    assert!(run(&["volume", "create", "work", "--size", "64M"]).status.success());
    let made = run(&["run", "-d", "--name", "keeper", "--volume", "work:/work"]);
    assert!(made.status.success(), "{made:?}");
    let folder = place.path("snap");
    let said = user.pvmm(["snapshot", "keeper", &folder, "--disk-only"]);
    refused(&said, &["keeper", "volumes"]);
    user.detached(&["--name", "web"]);
    user.shell("web", "head -c 64M /dev/urandom > /root/large");
    let mut writer = user.spawn(["snapshot", "web", &folder, "--disk-only"]);
    while fs::read_dir(place.0.path()).unwrap().count() < 2 {
        assert!(writer.try_wait().unwrap().is_none(), "the writer was not caught");
        std::thread::yield_now();
    }
    writer.kill().unwrap();
    writer.wait().unwrap();
    assert!(!Path::new(&folder).exists());
    user.ok(&["snapshot", "web", &folder, "--disk-only"]);
    let left: BTreeSet<_> =
        fs::read_dir(place.0.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(left, BTreeSet::from(["data".into(), "snap".into()]));
    kill(&user, &["keeper", "web"]);
}
