//! A snapshot survives a boot of its host: `make soak` writes a snapshot, boots the host again, and
//! restores the snapshot.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pvmm::snapshot::{LoadOptions, WriteOptions};
use pvmm::{Kvm, Template};
use pvmm_tests::child::Child;
use pvmm_tests::guest::Guest;
use tempfile::TempDir;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Returns a path that exists in every boot of a nested host.
fn kept() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/nested-out/reboot.tar")
}

fn tar(arguments: &[&str], dir: &Path) {
    let mut tar = Command::new("tar");
    let status = tar.args(arguments).arg(kept()).arg("-C").arg(dir).arg("snap").status().unwrap();
    assert!(status.success());
}

#[test]
#[ignore = "make soak, as the first half of the next test"]
fn first_boot_writes_a_snapshot() {
    let place = TempDir::new().unwrap();
    let mut guest = Guest::boot();
    let boot = fs::read_to_string(BOOT_ID).unwrap();
    guest.prints(&format!(
        "echo {} > /tmp/host; (sleep 5; echo slept > /tmp/slept) </dev/null >/dev/null 2>&1 &",
        boot.trim()
    ));
    guest.vm.freeze().unwrap().write(&place.path().join("snap"), WriteOptions::default()).unwrap();
    tar(&["--sparse", "-cf"], place.path());
}

#[test]
#[ignore = "make soak, after the test before it and a boot"]
fn soak_snapshot_of_an_earlier_boot_goes_on() {
    let place = TempDir::new().unwrap();
    tar(&["-xf"], place.path());
    fs::remove_file(kept()).unwrap();
    let template =
        Template::load(&Kvm::open().unwrap(), &place.path().join("snap"), LoadOptions::default())
            .unwrap();
    let child = Child::of(&template);
    let then = child.prints("cat /tmp/host");
    let now = fs::read_to_string(BOOT_ID).unwrap();
    assert_ne!(then, now.trim(), "the host was not booted in between");
    child.prints("for i in $(seq 300); do [ -e /tmp/slept ] && exit 0; sleep 0.1; done; exit 1");
    child.prints("echo 3 > /proc/sys/vm/drop_caches; md5sum /usr/bin/python3");
}
