//! Repetition: an operation that is repeated very often does not fail, does not slow down and
//! leaves nothing behind.
//!
//! Each test has a small count, which always runs, and a full count for `make soak`.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::snapshot::{LoadOptions, WriteOptions};
use pvmm::{Drive, Kvm, Template};
use pvmm_tests::census::{Census, check_even};
use pvmm_tests::child::{Child, SOON, prints, record};
use pvmm_tests::clock::check_clock;
use pvmm_tests::guest::Guest;
use pvmm_tests::stalls::Stalls;
use tempfile::TempDir;

/// Returns a template with its working set, loaded from a snapshot, as `pvmm template build` makes
/// one.
fn baked(dir: &Path) -> Template {
    let mut guest = Guest::boot();
    guest.prints("true");
    let mut template = guest.vm.freeze().unwrap();
    record(&mut template);
    template.write(dir, WriteOptions::default()).unwrap();
    drop((guest, template));
    Template::load(&Kvm::open().unwrap(), dir, LoadOptions::default()).unwrap()
}

fn restore_exec_kill(times: usize) {
    let place = TempDir::new().unwrap();
    let template = baked(&place.path().join("snap"));
    let cycle = || {
        let begun = Instant::now();
        assert_eq!(Child::of(&template).prints("echo $((6 * 7))"), "42");
        (begun, begun.elapsed())
    };
    // The first cycles make everything that is made only once.
    cycle();
    cycle();
    let stalls = Stalls::watch();
    let before = Census::take();
    let samples: Vec<_> = (0..times).map(|_| cycle()).collect();
    check_even("restore, exec, kill", &stalls, &samples);
    before.check();
}

#[test]
fn restore_exec_kill_some_times_leaves_nothing() {
    restore_exec_kill(12);
}

#[test]
#[ignore = "make soak"]
fn soak_restore_exec_kill() {
    restore_exec_kill(1000);
}

fn rollbacks(times: usize) {
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(16 << 20).unwrap();
    let mut guest = Guest::boot_with(|config| {
        config.drives.push(Drive::from_file(disk));
        // An emulator translates a program again for each address at which it is loaded. When its
        // buffer is full, it discards all translations, also those of the host, and the next
        // rollback takes twenty times as long.
        config.cmdline.push_str(" norandmaps");
    });
    guest.prints("echo 0 > /tmp/n");
    guest.vm.checkpoint().unwrap();
    let mut cycle = |round: usize| {
        let agent = guest.vm.agent(Instant::now() + SOON).unwrap();
        let line = "cat /tmp/n; head -c 4 /dev/vdb | od -An -tx1; echo 1 > /tmp/n; \
                    head -c 65536 /dev/urandom > /tmp/f; echo xxxx > /dev/vdb";
        // Changes for the rollback to undo are made in every tenth round. The other rollbacks
        // follow each other directly.
        if round.is_multiple_of(10) {
            assert_eq!(prints(&agent, line), "0\n 00 00 00 00");
        }
        drop(agent);
        let begun = Instant::now();
        guest.vm.rollback().unwrap();
        (begun, begun.elapsed())
    };
    cycle(0);
    cycle(0);
    let stalls = Stalls::watch();
    let before = Census::take();
    let samples: Vec<_> = (0..times).map(&mut cycle).collect();
    check_even("rollback", &stalls, &samples);
    before.check();
}

#[test]
fn rollback_some_times_leaves_nothing() {
    rollbacks(40);
}

#[test]
#[ignore = "make soak"]
fn soak_rollback() {
    rollbacks(10_000);
}

/// A program that draws random numbers in a loop, and marks in memory whether it is about to draw:
/// between the two marks it only counts.
const SPIN: &str = "import mmap, os
f = os.open('/dev/shm/drawn', os.O_RDWR | os.O_CREAT)
os.ftruncate(f, 4 << 20)
m, n = mmap.mmap(f, 4 << 20), 0
while True:
    m[0] = 1
    for _ in range(300000): pass
    m[0] = 2
    number = os.getrandom(16)
    n += 1
    m[16 * n:16 * n + 16] = number
    m[8:12] = n.to_bytes(4, 'little')
";

/// Freezes the workload while its process is about to draw. Returns how many numbers it has drawn.
fn freeze_about_to_draw(control: &Agent) -> u32 {
    for _ in 0..50 {
        control.freeze(Instant::now() + SOON).unwrap();
        let head = control.read_file("/dev/shm/drawn", 16 << 20).unwrap();
        if head[0] == 1 {
            return u32::from_le_bytes(head[8..12].try_into().unwrap());
        }
        control.thaw(Instant::now() + SOON).unwrap();
    }
    panic!("the process was never found about to draw");
}

/// Checks that forks differ: the first random bytes that a process draws after the fork, which it
/// was about to draw in the freeze, and the kernel's identities. The clock must be right.
fn forks_are_apart(count: usize) {
    let mut guest = Guest::boot();
    guest.agent.write_file("/tmp/spin.py", SPIN.as_bytes(), &Default::default()).unwrap();
    guest.prints(
        "python3 /tmp/spin.py </dev/null >/dev/null 2>&1 & \
         until [ \"$(od -An -tu4 -j8 -N4 /dev/shm/drawn 2>/dev/null)\" -gt 2 ]; do sleep 0.1; done 2>/dev/null",
    );
    let control = Agent::connect_control(&guest.socket(), Instant::now() + SOON).unwrap();
    let drawn = freeze_about_to_draw(&control);
    let template = guest.vm.freeze().unwrap();
    drop(guest);
    let line = format!(
        "until [ $(od -An -tu4 -j8 -N4 /dev/shm/drawn) -gt {drawn} ]; do sleep 0.01; done; \
         od -An -tx1 -j{} -N16 /dev/shm/drawn; cat /proc/sys/kernel/random/boot_id /etc/machine-id",
        16 * (drawn + 1)
    );
    let mut seen = BTreeSet::new();
    for round in 0..count {
        let child = Child::of(&template);
        let said = child.prints(&line);
        seen.extend(said.lines().map(str::to_owned));
        assert_eq!(seen.len(), 3 * (round + 1), "round {round}: {said}");
        check_clock(&child.agent);
    }
}

#[test]
fn first_random_bytes_after_a_fork_are_others_in_every_fork() {
    forks_are_apart(6);
}

#[test]
#[ignore = "make soak"]
fn soak_forks_are_apart() {
    forks_are_apart(64);
}

/// The longest pause of a busy guest that is forked. An emulated guest pauses for a tenth of this
/// while two other programs are busy; a guest that waits for a copy of its memory pauses for
/// longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Checks that memory and disk of a fork are of one instant: the guest counts in memory and on a
/// disk, and the disk is at most one step behind.
fn forks_under_load(count: usize) {
    let disk = tempfile::tempfile().unwrap();
    disk.set_len(1 << 20).unwrap();
    let mut guest = Guest::boot_with(|config| config.drives.push(Drive::from_file(disk)));
    let count_up = "import os,mmap\nd=os.open('/dev/vdb',os.O_RDWR|os.O_DIRECT)\n\
                    b=mmap.mmap(-1,4096)\nm=os.open('/dev/shm/n',os.O_RDWR|os.O_CREAT)\nn=0\n\
                    while True:\n n+=1\n s=b'%015d\\n'%n\n os.pwrite(m,s,0)\n b[0:16]=s\n os.pwrite(d,b,0)";
    guest.agent.write_file("/tmp/count.py", count_up.as_bytes(), &Default::default()).unwrap();
    guest.prints(
        "python3 /tmp/count.py </dev/null >/dev/null 2>&1 & \
                  until [ -s /dev/shm/n ]; do sleep 0.1; done",
    );
    let look = "pkill -STOP python3; sleep 0.2; cat /dev/shm/n; \
                dd if=/dev/vdb iflag=direct bs=4096 count=1 2>/dev/null | head -c 16; \
                pkill -CONT python3; sleep 0.3; cat /dev/shm/n";
    let mut last = 0;
    for round in 0..count {
        let begun = Instant::now();
        let template = guest.vm.freeze().unwrap();
        let (pause, whole) = (template.pause(), begun.elapsed());
        println!("fork {round}: the parent stood still for {pause:?} of {whole:?}");
        assert!(pause <= whole && pause < LONGEST_PAUSE, "round {round}: {pause:?} of {whole:?}");
        let said = Child::of(&template).prints(look);
        let numbers: Vec<u64> = said.lines().map(|line| line.parse().unwrap()).collect();
        let [memory, disk, later] = numbers[..] else { panic!("{said}") };
        assert!(memory - disk <= 1, "round {round}: {memory} in memory, {disk} on disk");
        assert!(memory > last && later > memory, "round {round}: {last} {memory} {later}");
        last = prints(&guest.agent_again(), "cat /dev/shm/n").parse().unwrap();
    }
}

#[test]
fn fork_of_a_busy_guest_has_memory_and_disk_of_one_instant() {
    forks_under_load(3);
}

#[test]
#[ignore = "make soak"]
fn soak_forks_under_load() {
    forks_under_load(20);
}

#[test]
fn fork_of_a_fork_lives_after_both_are_gone() {
    let mut guest = Guest::boot();
    guest.prints(
        "echo 1 > /tmp/n; head -c 12M /dev/urandom > /dev/shm/data; md5sum < /dev/shm/data",
    );
    let mut child = Child::of(&guest.vm.freeze().unwrap());
    child.prints("echo 2 > /tmp/n; head -c 12M /dev/urandom > /dev/shm/data");
    let sum = child.prints("md5sum < /dev/shm/data");
    let template = child.vm.freeze().unwrap();
    drop(guest);
    drop(child);
    let grandchild = Child::of(&template);
    drop(template);
    assert_eq!(grandchild.prints("cat /tmp/n; md5sum < /dev/shm/data"), format!("2\n{sum}"));
}
