//! The working set of a first exec: recorded once, and prefaulted in every VM of the template.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::exec::ExecRequest;
use pvmm::snapshot::{LoadOptions, WriteOptions};
use pvmm::{Kvm, Prefault, Template, Touched};
use pvmm_tests::child::{Child, SOON, prints, record};
use pvmm_tests::cli::{self, User};
use pvmm_tests::guest::Guest;
use tempfile::TempDir;

/// Writes a template whose guest has run `line`, with its working set recorded.
fn write_recorded(line: &str, dir: &Path) -> Touched {
    let mut guest = Guest::boot();
    guest.prints(line);
    let mut template = guest.vm.freeze().unwrap();
    drop(guest);
    let touched = record(&mut template);
    template.write(dir, WriteOptions::default()).unwrap();
    touched
}

#[test]
fn working_set_is_recorded_kept_in_the_snapshot_and_replayed() {
    let place = TempDir::new().unwrap();
    let dir = place.path().join("snap");
    let touched = write_recorded("true; echo kept > /tmp/word", &dir);
    println!("a first exec writes {} and reads {}", touched.written_bytes, touched.read_bytes);
    assert!((256 << 10..64 << 20).contains(&touched.written_bytes), "{touched:?}");
    assert!((256 << 10..64 << 20).contains(&touched.read_bytes), "{touched:?}");
    let template = Template::load(&Kvm::open().unwrap(), &dir, LoadOptions::default()).unwrap();
    for prefault in [Prefault::Nothing, Prefault::Mapped, Prefault::InKvm] {
        let child = Child::with(&template, |o| o.prefault = prefault);
        assert_eq!(child.prints("cat /tmp/word"), "kept", "{prefault:?}");
    }
}

#[test]
fn fork_at_rest_gives_back_pages_that_are_its_templates_and_lives_on() {
    let mut guest = Guest::boot();
    guest.prints("true");
    let mut template = guest.vm.freeze().unwrap();
    drop(guest);
    record(&mut template);
    let mut child = Child::of(&template);
    let sum = "head -c 4M /dev/urandom > /dev/shm/data; sha256sum /dev/shm/data";
    let before = child.prints(sum);
    let trimmed = child.vm.trim().unwrap();
    println!("gave {} KiB back", trimmed >> 10);
    assert!((64 << 10..8 << 20).contains(&trimmed), "{trimmed}");
    assert_eq!(child.prints("sha256sum /dev/shm/data"), before);
    child.vm.pause().unwrap();
    child.vm.trim().unwrap();
    child.vm.resume().unwrap();
    assert_eq!(child.prints("sha256sum /dev/shm/data"), before);
}

/// Makes a child that has run a command, idled and been trimmed. Returns the child, and the number
/// of mappings of shared pages that the trim has added.
fn rested(template: &Template) -> (Child, usize) {
    let mut child = Child::of(template);
    child.prints("true");
    thread::sleep(Duration::from_secs(2));
    let before = shared_pieces();
    child.vm.trim().unwrap();
    (child, shared_pieces() - before)
}

fn shared_pieces() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("sibling.bin")).count()
}

#[test]
fn forks_at_rest_share_what_a_first_use_has_made_and_part_when_they_write() {
    let place = TempDir::new().unwrap();
    let dir = place.path().join("snap");
    write_recorded("true", &dir);
    let template = Template::load(&Kvm::open().unwrap(), &dir, LoadOptions::default()).unwrap();
    let (mut one, pieces) = rested(&template);
    let (mut two, _) = rested(&template);
    println!("a fork shares {pieces} pieces");
    assert!(pieces >= 8, "{pieces}");
    let sum = |word: &str| format!("for i in $(seq 20000); do echo {word}$i; done > /dev/shm/f");
    let look = "sha256sum < /dev/shm/f";
    one.prints(&sum("one"));
    two.prints(&sum("two"));
    let sums = [one.prints(look), two.prints(look)];
    assert_ne!(sums[0], sums[1]);
    // After a fork, after a snapshot and after a rollback, each VM still has its own data.
    let grandchild = Child::of(&one.vm.freeze().unwrap());
    assert_eq!(grandchild.prints(look), sums[0]);
    let again = place.path().join("again");
    two.vm.freeze().unwrap().write(&again, WriteOptions::default()).unwrap();
    let restored =
        Child::of(&Template::load(&Kvm::open().unwrap(), &again, LoadOptions::default()).unwrap());
    assert_eq!(restored.prints(look), sums[1]);
    assert!(!again.join("sibling.bin").exists(), "it is no sibling's of this one");
    let (mut three, _) = rested(&template);
    three.vm.checkpoint().unwrap();
    three.prints(&sum("three"));
    three.vm.rollback().unwrap();
    let agent = Agent::connect(&three.socket(), Instant::now() + SOON).unwrap();
    assert_eq!(prints(&agent, "ls /dev/shm"), "");
}

#[test]
fn sibling_that_is_cut_or_a_link_or_nonsense_does_not_matter() {
    let place = TempDir::new().unwrap();
    let dir = place.path().join("snap");
    write_recorded("true; echo kept > /tmp/word", &dir);
    let sibling = dir.join("sibling.bin");
    let size = fs::metadata(&sibling).unwrap().len();
    let other = |make: &dyn Fn()| {
        fs::remove_file(&sibling).unwrap();
        make();
        let template = Template::load(&Kvm::open().unwrap(), &dir, LoadOptions::default()).unwrap();
        let (child, pieces) = rested(&template);
        assert_eq!(child.prints("cat /tmp/word"), "kept");
        pieces
    };
    assert_eq!(other(&|| fs::write(&sibling, [2; 4096]).unwrap()), 0);
    assert_eq!(other(&|| symlink(dir.join("memory.bin"), &sibling).unwrap()), 0);
    assert_eq!(other(&|| fs::write(&sibling, vec![0xa5; size as usize]).unwrap()), 0);
}

/// Measures the time from the request for a VM to the answer of its first exec, with and without
/// prefault. The variants are interleaved, so that other load on the host affects all alike.
#[test]
#[ignore = "make soak; figures, see docs/snapshots.md"]
fn soak_prefault_figures() {
    let mut guest = Guest::boot_with(|config| config.memory_mib = 512);
    guest.prints("true");
    let mut template = guest.vm.freeze().unwrap();
    drop(guest);
    println!("{:?}", record(&mut template));
    let wishes = [Prefault::Nothing, Prefault::Mapped, Prefault::InKvm];
    let mut samples: [Vec<(Duration, Duration)>; 3] = Default::default();
    for round in 0..43 {
        for offset in 0..3 {
            let index = (round + offset) % 3;
            let begun = Instant::now();
            let child = Child::with(&template, |o| o.prefault = wishes[index]);
            let refreshed = begun.elapsed();
            child.agent.exec(&ExecRequest::argv(["/bin/true"]).timeout(SOON)).unwrap();
            if round >= 3 {
                samples[index].push((begun.elapsed(), refreshed));
            }
        }
    }
    let mut medians = Vec::new();
    for (wish, mut samples) in wishes.into_iter().zip(samples) {
        samples.sort_unstable();
        let at = |part: usize| samples[(samples.len() - 1) * part / 100];
        println!("{wish:?}: min {:?} p50 {:?} p90 {:?} (exec, refreshed)", at(0), at(50), at(90));
        medians.push(at(50).0);
    }
    // The variants run in turns on one host, so only a harmful prefault takes half as long again as
    // none.
    assert!(medians.iter().all(|median| *median < medians[0] * 3 / 2), "{medians:?}");
}

/// Measures how long a VM is paused for a fork, and for a checkpoint, with up to 64 MiB changed.
#[test]
#[ignore = "make soak; figures, see docs/snapshots.md"]
fn soak_freeze_figures() {
    for dirty_mib in [0, 16, 64] {
        let mut guest = Guest::boot_with(|config| config.memory_mib = 512);
        guest.prints(&format!("head -c {dirty_mib}M /dev/urandom > /dev/shm/data"));
        let (mut beside, mut whole) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            let begun = Instant::now();
            beside.push(guest.vm.freeze().unwrap().pause());
            whole.push(begun.elapsed());
        }
        let begun = Instant::now();
        guest.vm.checkpoint().unwrap();
        println!(
            "{dirty_mib} MiB: beside {beside:?} (whole {whole:?}), in place {:?}",
            begun.elapsed()
        );
        // The changed pages are copied while the VM runs, not during the pause.
        let most = Duration::from_secs(5);
        let mut pairs = beside.iter().zip(&whole);
        assert!(pairs.all(|(pause, whole)| pause <= whole && *pause < most), "{beside:?}");
    }
}

/// Measures a warm command, and how much of its time is the round trip.
#[test]
#[ignore = "make soak; figures, see docs/snapshots.md"]
fn soak_exec_figures() {
    let guest = Guest::boot_with(|config| config.memory_mib = 512);
    let soon = || Instant::now() + SOON;
    let mut rows: Vec<(&str, Vec<Duration>)> = Vec::new();
    let mut note = |name, took| match rows.iter_mut().find(|row| row.0 == name) {
        Some(row) => row.1.push(took),
        None => rows.push((name, vec![took])),
    };
    for round in 0..63 {
        let mut time = |name, act: &mut dyn FnMut()| {
            let begun = Instant::now();
            act();
            if round >= 3 {
                note(name, begun.elapsed());
            }
        };
        time("ping", &mut || {
            guest.agent.ping(soon()).unwrap();
        });
        for (name, argv) in [
            ("no such program", "/no"),
            ("static /pvmm-agent --version", "/proc/1/exe"),
            ("/bin/true", "/bin/true"),
        ] {
            let request = ExecRequest::argv([argv, "--version"]).timeout(SOON);
            time(name, &mut || drop(guest.agent.exec(&request)));
        }
    }
    let mut medians = Vec::new();
    for (name, mut samples) in rows {
        samples.sort_unstable();
        println!("{name}: min {:?} p50 {:?}", samples[0], samples[samples.len() / 2]);
        medians.push(samples[samples.len() / 2]);
    }
    // A command takes longer than a round trip, and far less than its time limit.
    assert!(medians[0] < medians[3] && medians[3] < SOON / 4, "{medians:?}");
}

/// Eight seconds after its start a VM stands still while pages that equal its template are found.
#[test]
fn memory_is_given_back_without_a_search_for_holes() {
    let user = User::new();
    let calls = user.runtime().with_extension("calls");
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-e", "trace=lseek", "-o"]).arg(&calls).arg(cli::binary());
    command.args(["run", "--quiet", "--", "sleep", "12"]);
    let ended = command.env("PVMM_RUNTIME_DIR", user.runtime()).status().unwrap();
    assert_eq!(ended.code(), Some(0));
    let searches = fs::read_to_string(&calls).unwrap().lines().count();
    fs::remove_file(&calls).unwrap();
    // On a stacked file system they were 99,000.
    assert!(searches < 1000, "{searches} calls of lseek");
}
