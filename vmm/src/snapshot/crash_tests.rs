//! Kills a writer at every system call, and lets every call fail once: the folder stays whole.
//!
//! strace kills the victim, which is this test program itself, run again with one test.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use vm_memory::{Bytes, GuestAddress};

use super::read::Folder;
use super::write::Contents;
use super::*;
use crate::memory::{Memory, MemoryImage, Mode, Region};
use crate::storage::FrozenStorage;

const PLACE: &str = "PVMM_CRASH_PLACE";
const VICTIM: &str = "snapshot::crash_tests::victim";
/// Paths that are looked up before and after the writer runs, to find its calls in the trace.
const BEGIN: &str = "/pvmm-crash-test-begins";
const END: &str = "/pvmm-crash-test-ends";
/// Calls whose failure must be reported or compensated.
const TELLING: [&str; 13] = [
    "write",
    "pwrite64",
    "ftruncate",
    "fallocate",
    "copy_file_range",
    "fsync",
    "mkdir",
    "renameat2",
    "fchmod",
    "flock",
    "getrandom",
    "lseek",
    "openat",
];

/// Writes a snapshot over the existing one.
fn write(dir: &Path) -> Result<Manifest, Error> {
    write_with(dir, Durability::Full)
}

fn write_with(dir: &Path, durability: Durability) -> Result<Manifest, Error> {
    let region = Region { address: 0, len: 64 << 20 };
    let mut memory = Memory::map(MemoryImage::empty(vec![region]), Mode::Tracked, None).unwrap();
    for page in [0x5000, 0x30_0000, 0x30_1000] {
        memory.guest.write_slice(&[7; 4096], GuestAddress(page)).unwrap();
    }
    memory.freeze().unwrap();
    memory.guest.write_slice(&[8; 4096], GuestAddress(0x5000)).unwrap();
    let image = memory.record_dedup_source(&memory.image).unwrap();
    let disk = tempfile::tempfile().unwrap();
    disk.write_all_at(&[9; 8192], 0).unwrap();
    let saved = super::testing::saved();
    let contents = Contents {
        machine: &saved.machine,
        facts: super::testing::manifest(Vec::new()).machine,
        image: &image,
        drives: &[FrozenStorage::Fixed { file: disk, path: None }],
        taps: &[],
        vsock_path: None,
        base: None,
        working_set: None,
        note: b"",
    };
    let options = WriteOptions { replace: true, durability, ..Default::default() };
    marked(|| contents.write(dir, options))
}

/// Runs `act` between two markers, so that its calls are found in the trace.
pub(super) fn marked<T>(act: impl FnOnce() -> T) -> T {
    let _ = fs::metadata(BEGIN);
    let done = act();
    let _ = fs::metadata(END);
    done
}

/// Waits until strace has attached to this thread, and returns the folder to write to.
pub(super) fn held_victim() -> PathBuf {
    let place = PathBuf::from(std::env::var_os(PLACE).expect("a place"));
    // strace attaches to this thread alone and counts its calls from then on. It may or may not
    // count the call that the thread waits in, so that must be one which a writer does not make.
    let told = std::thread::spawn(|| std::io::stdin().read_line(&mut String::new()));
    println!("\nvictim {}", fs::read_link("/proc/thread-self").unwrap().display());
    told.join().unwrap().unwrap();
    place
}

#[test]
#[ignore = "run by the other tests here"]
fn victim() {
    write(&held_victim().join("snap")).expect("written");
}

/// Returns the identifier of a snapshot after comparing every byte of it.
fn whole(dir: &Path) -> String {
    let folder = Folder::open(dir).expect("a manifest");
    let saved = folder.state().expect("state");
    let everything = LoadOptions { verify: true, ..Default::default() };
    let mut files = folder.verify(&saved, &everything).expect("memory and disks");
    folder.layers(&saved, &mut files, &everything, 0).expect("memory");
    folder.drives(&mut files, &everything).expect("disks");
    folder.manifest.id.clone()
}

#[test]
fn folder_is_compared_once_where_it_was_copied_to_and_never_where_it_was_written() {
    let place = tempfile::tempdir().unwrap();
    let (here, there) = (place.path().join("here"), place.path().join("there"));
    write(&here).unwrap();
    let load = |dir: &Path| {
        let folder = Folder::open(dir)?;
        folder.verify(&folder.state()?, &LoadOptions::default()).map(drop)
    };
    load(&here).unwrap();
    assert!(!here.join(STAMP).exists());
    let copied = Command::new("cp").arg("-a").args([&here, &there]).status().unwrap();
    assert!(copied.success());
    load(&there).unwrap();
    assert!(there.join(STAMP).exists());
    // The recorded stamps hold until the file changes.
    let memory = there.join(MEMORY);
    fs::set_permissions(&memory, fs::Permissions::from_mode(0o600)).unwrap();
    let file = fs::File::options().write(true).open(&memory).unwrap();
    file.write_all_at(&[1], 0x5000).unwrap();
    assert!(matches!(load(&there), Err(SnapshotError::Checksum { .. })));
    file.write_all_at(&[7], 0x5000).unwrap();
    load(&there).unwrap();
}

/// A folder with a snapshot in it, in which a victim writes the next one under strace.
pub(super) struct Place {
    pub dir: tempfile::TempDir,
    log: tempfile::NamedTempFile,
    victim: &'static str,
}

impl Place {
    fn new() -> Self {
        let place = Self::empty(VICTIM);
        write(&place.snap()).unwrap();
        place
    }

    /// An empty folder, for a test that writes something else.
    pub fn empty(victim: &'static str) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        Self { dir: tempfile::tempdir().unwrap(), log, victim }
    }

    fn snap(&self) -> PathBuf {
        self.dir.path().join("snap")
    }

    fn names(&self) -> BTreeSet<String> {
        let entries = fs::read_dir(self.dir.path()).unwrap().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Removes what the last victim has left, so that the next one makes the counted calls.
    fn sweep(&self) {
        for name in self.names().into_iter().filter(|name| name != "snap") {
            fs::remove_dir_all(self.dir.path().join(name)).unwrap();
        }
    }

    /// Runs the victim and returns whether it wrote its snapshot.
    pub fn run(&self, expression: &str) -> bool {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", self.victim, "--ignored", "--nocapture"])
            .env(PLACE, self.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines().map_while(Result::ok);
        let thread = lines.find_map(|line| Some(line.strip_prefix("victim ")?.to_owned())).unwrap();
        let expressions = expression.split(" -e ").flat_map(|expression| ["-e", expression]);
        let mut strace = Command::new("strace")
            .args(expressions)
            .args(["-p", thread.rsplit('/').next().unwrap(), "-o"])
            .arg(self.log.path())
            .stderr(Stdio::piped())
            .spawn()
            .expect("strace should be installed; `make test` does it");
        // The thread is traced before it is stopped; its calls are counted only from then on.
        let mut told = BufReader::new(strace.stderr.take().unwrap()).lines().map_while(Result::ok);
        assert!(told.any(|line| line.contains("attached")), "strace cannot attach");
        let _ = victim.stdin.take().unwrap().write_all(b"\n");
        lines.for_each(drop);
        let written = victim.wait().unwrap().success();
        strace.wait().unwrap();
        written
    }

    /// Returns the writer's calls: the name of each, and how many of that name came before it, as
    /// strace counts.
    pub fn calls(&self) -> Vec<(String, usize)> {
        assert!(self.run("trace=all"));
        let log = fs::read_to_string(self.log.path()).unwrap();
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let (mut calls, mut ours) = (Vec::new(), false);
        for line in log.lines() {
            let Some((name, _)) = line.split_once('(') else { continue };
            let count = counts.entry(name).or_default();
            *count += 1;
            ours = (ours || line.contains(BEGIN)) && !line.contains(END);
            if ours {
                calls.push((name.to_owned(), *count));
            }
        }
        calls
    }
}

#[test]
fn writer_killed_at_any_system_call_leaves_the_old_snapshot_or_the_new_one() {
    let place = Place::new();
    let calls = place.calls();
    assert!(calls.len() > 50, "{calls:?}");
    let (mut old, mut new) = (0, 0);
    for (name, count) in &calls {
        let before = whole(&place.snap());
        let written = place.run(&format!("inject={name}:signal=KILL:when={count}"));
        assert!(!written, "{name} {count}: was to be killed");
        let is_new = whole(&place.snap()) != before;
        (old, new) = (old + usize::from(!is_new), new + usize::from(is_new));
        place.sweep();
    }
    println!("killed at {} calls: the old one {old} times, the new one {new} times", calls.len());
    assert!(old > 50 && new > 5, "{old} {new}");
    // The next writer removes what a killed one has left.
    place.run("inject=fchmod:signal=KILL");
    assert_eq!(place.names().len(), 2);
    write(&place.snap()).unwrap();
    assert_eq!(place.names(), BTreeSet::from(["snap".to_owned()]));
}

/// H16: strace reports for the kernel that it took only a part of a write. The next load finds what
/// is missing, and the rest was written: a writer that took the count for an error, or for the
/// whole length, would do neither.
#[test]
fn h16_write_that_the_host_takes_in_part_is_gone_on_with_and_what_is_lost_is_found() {
    for name in ["pwrite64", "write"] {
        let place = Place::new();
        let calls = place.calls();
        let of_name = |calls: &[(String, usize)]| calls.iter().filter(|(n, _)| n == name).count();
        let (usual, first) = (of_name(&calls), calls.iter().find(|(n, _)| n == name).unwrap().1);
        let written = place.run(&format!("trace=all -e inject={name}:retval=100:when={first}"));
        assert!(written, "{name}: the rest was to be written");
        let log = fs::read_to_string(place.log.path()).unwrap();
        let again = log.lines().filter(|line| line.starts_with(&format!("{name}("))).count();
        assert!(again > usual, "{name}: {again} calls, {usual} of whole writes");
        let load = |dir: &Path| {
            let folder = Folder::open(dir)?;
            let everything = LoadOptions { verify: true, ..Default::default() };
            folder.verify(&folder.state()?, &everything).map(drop)
        };
        assert!(load(&place.snap()).is_err(), "{name}: bytes are missing");
    }
}

/// A load does not write one either before it has synced what it compared.
#[test]
fn folder_written_without_syncing_has_no_stamp_until_its_bytes_are_on_the_disk() {
    let place = Place::empty("snapshot::crash_tests::loading_victim");
    let dir = place.snap();
    write_with(&dir, Durability::None).unwrap();
    assert!(Folder::open(&dir).unwrap().state().unwrap().stamps.is_empty());
    let calls = place.calls();
    let position = |name: &str| calls.iter().position(|(call, _)| call.starts_with(name));
    let last_sync = calls.iter().rposition(|(call, _)| call == "fsync").expect("a sync");
    assert!(last_sync < position("rename").expect("a stamp"), "{calls:?}");
    assert!(dir.join(STAMP).exists());
    // With syncing, the writer records the stamps itself.
    write(&dir).unwrap();
    assert!(!Folder::open(&dir).unwrap().state().unwrap().stamps.is_empty());
}

#[test]
#[ignore = "run by the test above"]
fn loading_victim() {
    let dir = held_victim().join("snap");
    let folder = Folder::open(&dir).unwrap();
    let saved = folder.state().unwrap();
    marked(|| folder.verify(&saved, &LoadOptions::default()).map(drop)).unwrap();
}

#[test]
fn writer_for_whom_any_system_call_fails_says_so_and_leaves_nothing() {
    let place = Place::new();
    let mut calls = place.calls();
    calls.retain(|(name, _)| TELLING.contains(&name.as_str()));
    let mut failed = 0;
    for (index, (name, count)) in calls.iter().enumerate() {
        let errno = if index.is_multiple_of(2) { "EIO" } else { "ENOSPC" };
        let before = whole(&place.snap());
        let written = place.run(&format!("inject={name}:error={errno}:when={count}"));
        let after = whole(&place.snap());
        assert!(!written || after != before, "{errno} of {name} {count} was not noticed");
        // A folder that cannot be opened cannot be removed either; the next writer does it.
        let left = place.names().len() - 1;
        assert!(left == 0 || name == "openat", "{errno} of {name} {count}: {:?}", place.names());
        place.sweep();
        failed += usize::from(!written);
    }
    println!("{failed} failures of {} calls were told, the others made good", calls.len());
    assert!(failed > 15, "{failed}");
}

#[test]
fn writer_beside_a_pipe_and_a_link_with_hidden_names_waits_for_nobody_and_leaves_them() {
    let place = tempfile::tempdir().unwrap();
    let hidden = |name: &str| place.path().join(format!("{}{name}", super::write::UNFINISHED));
    assert!(Command::new("mkfifo").arg(hidden("pipe")).status().unwrap().success());
    std::os::unix::fs::symlink(hidden("pipe"), hidden("link")).unwrap();
    write(&place.path().join("snap")).unwrap();
    assert!(hidden("pipe").exists() && hidden("link").is_symlink());
}
