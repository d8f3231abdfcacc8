//! A real jail around a real program: needs root, as the jailer does, and a static busybox.

#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const BUSYBOX: &str = "/usr/bin/busybox";

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    /// Only root can make a jail.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::metadata(dir.path()).unwrap().uid() == 0;
        assert!(root, "this test makes a jail: run it as root");
        assert!(Path::new(BUSYBOX).exists(), "no {BUSYBOX}: apt-get install busybox-static");
        fs::create_dir(dir.path().join("jails")).unwrap();
        fs::copy(BUSYBOX, dir.path().join("echo")).unwrap();
        Self { dir }
    }

    fn root(&self, id: &str) -> PathBuf {
        self.dir.path().join("jails/echo").join(id).join("root")
    }

    /// `echo` says its arguments from inside.
    fn jail(&self, id: &str, more: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_pvmm-jailer"))
            .args(["--id", id, "--uid", "123", "--gid", "100", "--exec-file"])
            .arg(self.dir.path().join("echo"))
            .arg("--chroot-base-dir")
            .arg(self.dir.path().join("jails"))
            .args(more)
            .output()
            .unwrap()
    }
}

fn said(output: &Output) -> String {
    let text = [output.stdout.as_slice(), &output.stderr].concat();
    String::from_utf8(text).unwrap()
}

#[test]
fn program_runs_in_a_root_of_its_own_with_its_devices() {
    let place = Place::new();
    let output = place.jail("one", &["--", "--api-sock", "/run/a.sock"]);
    assert!(output.status.success(), "{}", said(&output));
    let line = said(&output);
    assert!(line.starts_with("--id one --start-time-us "), "{line}");
    assert!(line.trim_end().ends_with(" --api-sock /run/a.sock"), "{line}");
    let root = place.root("one");
    for (path, device) in
        [("dev/kvm", (10, 232)), ("dev/net/tun", (10, 200)), ("dev/urandom", (1, 9))]
    {
        let facts = fs::metadata(root.join(path)).unwrap();
        assert!(facts.file_type().is_char_device(), "{path}");
        assert_eq!((facts.uid(), facts.gid(), facts.mode() & 0o777), (123, 100, 0o600), "{path}");
        assert_eq!((libc::major(facts.rdev()), libc::minor(facts.rdev())), device, "{path}");
    }
    assert_eq!(fs::metadata(&root).unwrap().uid(), 123);
    let pid: u32 = fs::read_to_string(root.join("echo.pid")).unwrap().parse().unwrap();
    assert!(pid > 1);
    assert!(!root.join("old_root").exists());
    // The same jail is not used twice.
    let again = place.jail("one", &[]);
    assert!(!again.status.success() && said(&again).contains("earlier run"), "{}", said(&again));
}

#[test]
fn k6_path_that_is_no_network_namespace_is_refused_and_leaves_nothing() {
    let place = Place::new();
    for path in ["/no/such", "/dev/null", "/proc/self/ns/uts", "/"] {
        let output = place.jail("two", &["--netns", path]);
        let text = said(&output);
        assert!(!output.status.success() && text.contains("network namespace"), "{text}");
        assert!(!place.root("two").exists(), "{path}");
    }
}

#[test]
fn k8_control_group_that_cannot_be_made_is_refused_and_leaves_nothing() {
    let place = Place::new();
    let output = place.jail("two", &["--cgroup", "nope.max=1"]);
    assert!(!output.status.success(), "{}", said(&output));
    assert!(!place.root("two").exists());
}

#[test]
fn link_in_place_of_a_folder_hands_out_nothing() {
    let place = Place::new();
    let root = place.root("four");
    fs::create_dir_all(root.join("images")).unwrap();
    for folder in ["dev", "run"] {
        std::os::unix::fs::symlink("/images", root.join(folder)).unwrap();
        let output = place.jail("four", &[]);
        assert!(!output.status.success() && said(&output).contains(folder), "{}", said(&output));
        let facts = fs::metadata(root.join("images")).unwrap();
        assert_eq!((facts.uid(), facts.mode() & 0o777), (0, 0o755), "{folder}");
        fs::remove_file(root.join(folder)).unwrap();
        let _ = fs::remove_dir_all(root.join("dev"));
    }
}

#[test]
fn detached_program_has_its_pid_written_down_and_says_nothing() {
    let place = Place::new();
    let output = place.jail("three", &["--daemonize", "--new-pid-ns"]);
    assert!(output.status.success(), "{}", said(&output));
    let file = place.root("three").join("echo.pid");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while fs::read_to_string(&file).unwrap_or_default().is_empty() {
        assert!(std::time::Instant::now() < deadline, "no pid file");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(said(&output), "");
}
