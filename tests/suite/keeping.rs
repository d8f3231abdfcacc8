//! Volumes, hibernated VMs, and a time to live that is changed while a VM runs.

use std::time::{Duration, Instant};

use pvmm_tests::cli::{Said, User};
use tempfile::TempDir;

/// A user with a data directory of their own.
struct Keeper {
    user: User,
    data: TempDir,
}

impl Keeper {
    fn new() -> Self {
        Self { user: User::new(), data: tempfile::tempdir().unwrap() }
    }

    fn pvmm(&self, args: &[&str]) -> Said {
        let start = Instant::now();
        let output =
            self.user.command(args).env("XDG_DATA_HOME", self.data.path()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Said { code: output.status.code(), stdout: output.stdout, stderr, took: start.elapsed() }
    }

    /// Runs a command that must succeed, and returns what it printed.
    fn say(&self, line: &str) -> String {
        let said = self.pvmm(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(said.code, Some(0), "{line}: {said:?}");
        said.text().to_owned()
    }

    /// Runs a shell line in a running VM.
    fn shell(&self, vm: &str, line: &str) -> String {
        let said = self.pvmm(&["exec", vm, "--", "sh", "-c", line]);
        assert_eq!(said.code, Some(0), "{line}: {said:?}");
        said.text().to_owned()
    }
}

#[test]
fn volume_keeps_what_a_vm_wrote_for_the_next_one_and_a_reader_cannot_write() {
    let keeper = Keeper::new();
    keeper.say("volume create work --size 64M");
    let write = ["run", "--volume", "work", "--", "sh", "-c", "echo kept > /workspace/f"];
    assert_eq!(keeper.pvmm(&write).code, Some(0));
    assert_eq!(keeper.say("run --volume work:/data -- cat /data/f"), "kept");
    assert_eq!(keeper.say("run --volume work:/data:ro -- cat /data/f"), "kept");
    assert_ne!(
        keeper.pvmm(&["run", "--volume", "work:/d:ro", "--", "touch", "/d/x"]).code,
        Some(0)
    );
}

#[test]
fn volume_is_there_in_a_vm_forked_from_a_template_that_was_baked_for_volumes() {
    let keeper = Keeper::new();
    keeper.say("volume create work --size 64M");
    keeper.say("template bake -q --volumes rw");
    // Only a warm template has an interpreter that waits.
    let line = "cat /proc/[0-9]*/comm; echo kept > /workspace/f";
    let forked = keeper.pvmm(&["run", "--volume", "work", "--", "sh", "-c", line]);
    assert!(forked.text().contains("python3"), "{forked:?}");
    assert_eq!(keeper.say("run --cold --volume work:/data -- cat /data/f"), "kept");
}

#[test]
fn volume_that_a_vm_writes_is_refused_to_all_others_until_the_vm_ends() {
    let keeper = Keeper::new();
    keeper.say("volume create work --size 64M");
    keeper.say("run -d --name one --volume work");
    for line in ["run --volume work -- true", "volume rm work", "volume resize work 128M"] {
        let refused = keeper.pvmm(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(refused.code, Some(2), "{line}: {refused:?}");
        assert!(refused.stderr.contains("in use"), "{refused:?}");
    }
    // A reader must not see a file system that changes under it.
    assert_ne!(keeper.pvmm(&["run", "--volume", "work:/d:ro", "--", "true"]).code, Some(0));
    keeper.say("kill one");
    keeper.say("volume resize work 128M");
    keeper.say("volume cp work other");
    assert_eq!(keeper.say("run --volume other -- sh -c true"), "");
    keeper.say("volume rm work other");
}

#[test]
fn hibernated_vm_takes_no_process_and_goes_on_with_its_processes_files_and_volume() {
    let keeper = Keeper::new();
    keeper.say("volume create work --size 64M");
    keeper.say("run -d --name web --cpus 2 --volume work");
    keeper.shell("web", "echo disk > /root/f; echo volume > /workspace/f");
    keeper.shell(
        "web",
        "setsid sh -c 'while :; do date +%s > /run/beat; sleep 0.2; done' >&- 2>&- &",
    );
    keeper.say("hibernate web");
    assert!(keeper.say("ps").contains("hibernated"));
    assert_eq!(keeper.pvmm(&["exec", "web", "--", "true"]).code, Some(2));
    keeper.say("wake web");
    assert_eq!(keeper.shell("web", "cat /root/f /workspace/f"), "disk\nvolume");
    let beat = "sleep 2; echo $(($(date +%s) - $(cat /run/beat)))";
    assert!(keeper.shell("web", beat).parse::<u64>().unwrap() <= 1, "its process goes on");
    keeper.shell("web", "echo more >> /workspace/f");
    keeper.say("kill web");
    assert_eq!(keeper.say("run --volume work -- cat /workspace/f"), "volume\nmore");
}

#[test]
fn hibernated_vm_that_is_not_wanted_any_more_is_removed_from_the_disk() {
    let keeper = Keeper::new();
    keeper.say("run -d --name web");
    keeper.say("hibernate web");
    keeper.say("rm web");
    assert_eq!(keeper.pvmm(&["wake", "web"]).code, Some(2));
    let left = std::fs::read_dir(keeper.data.path().join("pvmm/hibernated")).unwrap().count();
    assert_eq!(left, 0);
}

#[test]
fn ttl_of_a_running_vm_is_made_longer_and_shorter() {
    let keeper = Keeper::new();
    keeper.say("run -d --name web --ttl 20s");
    keeper.say("ttl web 1h");
    keeper.say("pause web");
    keeper.say("ttl web 2h");
    keeper.say("resume web");
    keeper.say("ttl web none");
    std::thread::sleep(Duration::from_secs(1));
    assert!(keeper.say("ps").contains("running"));
    keeper.say("ttl web 1s");
    let deadline = Instant::now() + Duration::from_secs(20);
    while keeper.say("ps --json").contains("running") {
        assert!(Instant::now() < deadline, "its time to live has passed");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(keeper.say("ps --json").contains("(ttl)"));
    keeper.say("rm web");
}
