//! Much data and many streams: complete, in order, in bounded memory, none blocking another.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pvmm::agent::AgentError;
use pvmm::exec::{ExecError, ExecRequest, ProcessEvent};

use crate::fixture::{Fixture, wait_for};

#[test]
fn stdin_of_50_mb_arrives_complete() {
    let fixture = Fixture::start();
    let block: Vec<u8> =
        (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut process =
        fixture.agent().start(&ExecRequest::shell("cat | sha256sum").piped_stdin()).unwrap();
    let mut stdin = process.take_stdin().unwrap();
    assert!(process.take_stdin().is_none());
    for _ in 0..50 {
        stdin.write_all(&block).unwrap();
    }
    stdin.close().unwrap();
    let mut sum = Vec::new();
    while let Some(ProcessEvent::Stdout(bytes)) = process.next_event(None).unwrap() {
        sum.extend(bytes);
    }
    let mut here = std::process::Command::new("sha256sum")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut pipe = here.stdin.take().unwrap();
    for _ in 0..50 {
        pipe.write_all(&block).unwrap();
    }
    drop(pipe);
    assert_eq!(sum, here.wait_with_output().unwrap().stdout);
}

#[test]
fn stdout_of_200_mb_arrives_complete_and_in_order() {
    let fixture = Fixture::start();
    // A period that divides no buffer: a lost, doubled or swapped piece shows.
    let period = b"0123456789abcdef\n";
    let line = "yes 0123456789abcdef | head -c 209715200";
    let before = fixture.private_kib();
    let mut process = fixture.agent().start(&ExecRequest::shell(line)).unwrap();
    let expected = period.repeat(1 + (128 << 10) / period.len());
    let mut total = 0u64;
    let status = loop {
        match process.next_event(None).unwrap().unwrap() {
            ProcessEvent::Stdout(bytes) => {
                let phase = (total % period.len() as u64) as usize;
                assert!(bytes == expected[phase..phase + bytes.len()], "out of order at {total}");
                total += bytes.len() as u64;
            }
            ProcessEvent::Stderr(bytes) => panic!("{bytes:?}"),
            ProcessEvent::Exited(status) => break status,
        }
    };
    assert!(status.success());
    assert_eq!((total, status.stdout.total), (200 << 20, 200 << 20));
    let grown = fixture.private_kib().saturating_sub(before);
    assert!(grown < 2048, "the agent grew by {grown} KiB");
}

#[test]
fn pid_of_a_process_that_says_nothing_is_told_all_the_same() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let process = agent.start(&ExecRequest::argv(["sleep", "60"])).unwrap();
    wait_for("the process's number", || process.pid().is_some());
}

#[test]
fn stdout_of_a_sequence_arrives_in_order() {
    let fixture = Fixture::start();
    let mut process = fixture.agent().start(&ExecRequest::shell("seq 1 3000000")).unwrap();
    let (mut next, mut rest) = (1u32, Vec::new());
    while let Some(ProcessEvent::Stdout(bytes)) = process.next_event(None).unwrap() {
        rest.extend(bytes);
        let end = rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        for line in rest[..end].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            assert_eq!(line, next.to_string().as_bytes());
            next += 1;
        }
        rest.drain(..end);
    }
    assert_eq!(next, 3_000_001);
}

#[test]
fn execs_in_parallel_get_their_own_output() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    thread::scope(|scope| {
        for number in 0..100 {
            let agent = agent.clone();
            scope.spawn(move || {
                let line = format!("echo {number}; echo e{number} >&2; exit {number}");
                let output = agent.exec(&ExecRequest::shell(line)).unwrap();
                assert_eq!(output.stdout.bytes, format!("{number}\n").as_bytes());
                assert_eq!(output.stderr.bytes, format!("e{number}\n").as_bytes());
                assert_eq!(output.status.shell_code(), number);
            });
        }
    });
    assert_eq!(agent.ignored_frames(), 0);
    assert_eq!(agent.info().unwrap().execs, 0);
}

#[test]
fn g14_execs_beyond_the_cap_are_refused_and_none_hangs() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let (done, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let mut processes: Vec<_> =
        (0..1000).map(|_| agent.start(&ExecRequest::argv(["sleep", "60"])).unwrap()).collect();
    // Those within the cap run; every other is told at once that there are too many.
    for process in &mut processes {
        match process.next_event(Some(Instant::now() + Duration::from_millis(1))) {
            Ok(None) => done.fetch_add(1, Ordering::Relaxed),
            Err(ExecError::Agent(AgentError::TooMany)) => refused.fetch_add(1, Ordering::Relaxed),
            other => panic!("{other:?}"),
        };
    }
    assert_eq!(done.into_inner(), 256);
    assert_eq!(refused.into_inner(), 744);
    drop(processes);
    crate::fixture::wait_for("the end of the cancelled", || agent.info().unwrap().execs == 0);
    assert!(agent.exec(&ExecRequest::argv(["true"])).unwrap().status.success());
}

#[test]
fn stream_that_nobody_reads_does_not_block_another_nor_grow_the_agent() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let before = fixture.private_kib();
    let mut slow: Vec<_> =
        (0..8).map(|_| agent.start(&ExecRequest::argv(["yes"])).unwrap()).collect();
    thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    let output = agent.exec(&ExecRequest::shell("echo quick")).unwrap();
    assert_eq!(output.stdout.bytes, b"quick\n");
    assert!(begun.elapsed() < Duration::from_secs(10));
    let grown = fixture.private_kib().saturating_sub(before);
    assert!(grown < 2048, "the agent grew by {grown} KiB");
    // Each has its window and not more; taking from one lets that one go on.
    let mut taken = 0;
    while taken < 1 << 20 {
        match slow[0].next_event(None).unwrap() {
            Some(ProcessEvent::Stdout(bytes)) => taken += bytes.len(),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn process_that_does_not_read_stops_its_writer_only() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let mut process = agent.start(&ExecRequest::shell("sleep 60").piped_stdin()).unwrap();
    let mut stdin = process.take_stdin().unwrap();
    let writer = thread::spawn(move || {
        let mut total = 0;
        while let Ok(count) = stdin.write(&[0; 65536]) {
            total += count;
        }
        total
    });
    thread::sleep(Duration::from_millis(100));
    assert!(agent.exec(&ExecRequest::argv(["true"])).unwrap().status.success());
    process.kill().unwrap();
    process.wait().unwrap();
    let total = writer.join().unwrap();
    assert!(total <= 512 << 10, "{total} bytes were taken for a process that reads none");
}

#[test]
fn agent_memory_is_flat_over_many_execs() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let round = || {
        for _ in 0..100 {
            agent.exec(&ExecRequest::argv(["true"])).unwrap();
        }
    };
    round();
    let before = fixture.private_kib();
    (0..5).for_each(|_| round());
    let grown = fixture.private_kib().saturating_sub(before);
    assert!(grown < 128, "the agent grew by {grown} KiB over 500 execs");
    // What belongs to the last command goes when nobody waits for the agent; what came from whoever
    // runs the tests stays.
    let inherited = inherited_descriptors();
    let folder = format!("/proc/{}/fd", fixture.pid());
    let descriptors = || std::fs::read_dir(&folder).unwrap().count() - inherited;
    let late = Instant::now() + Duration::from_secs(5);
    while descriptors() >= 16 {
        assert!(Instant::now() < late, "{} descriptors are open in an idle agent", descriptors());
        thread::sleep(Duration::from_millis(20));
    }
}

/// How many descriptors beyond the usual three a program gets that is started here.
fn inherited_descriptors() -> usize {
    let passed_on = |entry: &std::fs::DirEntry| {
        let number: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
        number > 2 && flags.is_some_and(|flags| flags & libc::O_CLOEXEC == 0)
    };
    std::fs::read_dir("/proc/self/fdinfo").unwrap().flatten().filter(passed_on).count()
}

#[test]
fn agent_at_rest_does_not_wake() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    agent.exec(&ExecRequest::argv(["true"])).unwrap();
    let wakeups = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", fixture.pid())).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse::<u64>().unwrap()
    };
    // It tidies up after a command once, two seconds later.
    thread::sleep(Duration::from_secs(3));
    let before = wakeups();
    thread::sleep(Duration::from_secs(1));
    assert_eq!(wakeups(), before);
}
