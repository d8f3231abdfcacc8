//! Work that is cut short by Ctrl-C, a cap or a full disk ends with one error line and leaves
//! nothing behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use pvmm_tests::cli::{Said, User};
use tempfile::TempDir;

const SOON: Duration = Duration::from_secs(60);

/// Checks that a command failed with one error line and printed nothing. Returns its standard
/// error.
fn refused(said: &Said) -> &str {
    let errors = said.stderr.lines().filter(|line| line.starts_with("error: ")).count();
    assert_eq!((said.code, errors), (Some(125), 1), "{said:?}");
    assert!(said.stdout.is_empty(), "{said:?}");
    &said.stderr
}

/// A tmpfs of a given size in KiB, which is unmounted on drop.
struct Small(TempDir);

impl Small {
    fn of(kib: u32) -> Self {
        let dir = TempDir::new().unwrap();
        let size = format!("size={kib}k");
        let mut mount = Command::new("mount");
        mount.args(["-n", "-t", "tmpfs", "-o", &size, "small"]).arg(dir.path());
        assert!(mount.status().unwrap().success());
        Self(dir)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        assert!(Command::new("umount").arg("-n").arg(self.0.path()).status().unwrap().success());
    }
}

fn interrupt(child: &mut Child) -> Option<i32> {
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    child.wait().unwrap().code()
}

/// Waits until `dir` has an entry whose name begins with `start`, and returns its path. `child`
/// must still run.
fn appears(dir: &Path, start: &str, child: &mut Child) -> PathBuf {
    let deadline = Instant::now() + SOON;
    loop {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let found = entries.map(|entry| entry.path()).find(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start))
        });
        if let Some(path) = found {
            return path;
        }
        assert!(child.try_wait().unwrap().is_none(), "it ended before {start} was there");
        assert!(Instant::now() < deadline, "{start} does not appear");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn snapshot_and_bake_that_are_interrupted_end_and_leave_nothing() {
    let user = User::new();
    let vm = user.detached(&["--memory", "512M"]);
    // Writing this much takes a while.
    let fill = "dd if=/dev/urandom of=/dev/shm/fill bs=1M count=200 2>/dev/null";
    assert_eq!(user.pvmm(["exec", &vm, "--", "sh", "-c", fill]).code, Some(0));
    let place = TempDir::new().unwrap();
    let target = place.path().join("snap");
    let mut child = user.spawn(["snapshot", &vm, target.to_str().unwrap()]);
    appears(place.path(), ".pvmm-unfinished-", &mut child);
    assert_eq!(interrupt(&mut child), Some(130));
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    // The VM is not affected.
    assert_eq!(user.pvmm(["exec", &vm, "--", "true"]).code, Some(0));
    assert_eq!(user.pvmm(["kill", &vm]).code, Some(0));

    // No template of this size exists.
    let mut child = user.spawn(["template", "bake", "base", "--memory", "301M"]);
    let room = appears(&std::env::temp_dir(), "pvmm-bake-", &mut child);
    assert_eq!(interrupt(&mut child), Some(130));
    assert!(!room.exists());
}

#[test]
fn copy_out_of_a_vm_stops_at_its_caps() {
    let user = User::new();
    let vm = user.detached(&[]);
    let make = "mkdir /many && touch /many/1 /many/2 /many/3 /many/4 && \
                dd if=/dev/zero of=/big bs=1M count=3 2>/dev/null && cp /big /many/big";
    assert_eq!(user.pvmm(["exec", &vm, "--", "sh", "-c", make]).code, Some(0));
    let place = TempDir::new().unwrap();
    let copy = |flags: &[&str], from: &str| {
        let (from, to) = (format!("{vm}:{from}"), place.path().join("copy"));
        user.pvmm([&["cp"], flags, &[&from, to.to_str().unwrap()]].concat())
    };
    assert!(refused(&copy(&["--max-size", "1M"], "/big")).contains("--max-size"));
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "half a file is left");
    assert!(refused(&copy(&["--max-size", "1M"], "/many")).contains("--max-size"));
    assert!(refused(&copy(&["--max-files", "3"], "/many")).contains("--max-files"));
    assert_eq!(copy(&["--max-size", "4M"], "/big").code, Some(0));
    assert_eq!(user.pvmm(["kill", &vm]).code, Some(0));
}

#[test]
fn full_disk_during_a_copy_and_a_run_is_one_line() {
    let user = User::new();
    let vm = user.detached(&[]);
    let make = "mkdir /d; dd if=/dev/zero of=/d/big bs=1M count=3 2>/dev/null";
    assert_eq!(user.pvmm(["exec", &vm, "--", "sh", "-c", make]).code, Some(0));
    let small = Small::of(1024);
    for from in ["/d/big", "/d"] {
        let to = small.0.path().join("copy");
        let said = user.pvmm(["cp", &format!("{vm}:{from}"), to.to_str().unwrap()]);
        assert!(refused(&said).contains("No space left on device"), "{from}: {said:?}");
        assert!(!to.join("big").exists() && !to.is_file(), "half a file is left");
        let _ = fs::remove_dir_all(&to);
    }
    drop(small);
    assert_eq!(user.pvmm(["kill", &vm]).code, Some(0));

    let small = Small::of(64);
    let mut run = user.command(["run", "--cold", "--", "true"]);
    run.env("PVMM_SCRATCH_DIR", small.0.path()).env("PVMM_SCRATCH_IN_MEMORY", "1");
    let output = run.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(125), "{error}");
    assert_eq!(error.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{error}");
    assert!(error.contains("No space left on device"), "{error}");
    assert!(error.contains("warning: VM disks are in this host's memory"), "{error}");
}
