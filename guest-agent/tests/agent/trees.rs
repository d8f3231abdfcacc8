//! Whole trees of processes: ended together, whatever they do to escape, and nothing left behind.

use std::path::Path;
use std::time::{Duration, Instant};

use pvmm::agent::{AgentError, Lost};
use pvmm::exec::{ExecError, ExecRequest, ExecStatus, ProcessEvent};

use crate::fixture::{Fixture, wait_for};

fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.starts_with(" Z"))
}

/// Starts a shell line that prints pids, one per line, and waits for `count` of them.
fn start_tree(fixture: &Fixture, line: &str, count: usize) -> (pvmm::exec::Process, Vec<u32>) {
    let request = ExecRequest::shell(line);
    let mut process = fixture.agent().start(&request).unwrap();
    let mut text = String::new();
    while text.lines().count() < count {
        match process.next_event(None).unwrap() {
            Some(ProcessEvent::Stdout(bytes)) => text += &String::from_utf8(bytes).unwrap(),
            other => panic!("{other:?}"),
        }
    }
    (process, text.lines().map(|line| line.parse().unwrap()).collect())
}

const DEAF_TREE: &str = "trap '' TERM; echo $$; \
     (trap '' TERM; sh -c 'echo $$; sleep 60') & \
     setsid sh -c 'trap \"\" TERM; echo $$; sleep 60' & \
     wait; sleep 60";

#[test]
fn timeout_of_a_deaf_tree_kills_all_of_it_g9() {
    for fixture in [Fixture::start(), Fixture::start_without_cgroups()] {
        let begun = Instant::now();
        let request = ExecRequest::shell(DEAF_TREE)
            .timeout(Duration::from_millis(300))
            .grace(Duration::from_millis(200));
        let output = fixture.agent().exec(&request).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        assert!(output.status.timed_out);
        assert!(matches!(output.status.status, ExecStatus::Signaled { signal: 9, .. }));
        let text = String::from_utf8(output.stdout.bytes).unwrap();
        assert_eq!(text.lines().count(), 3, "{text}");
        for pid in text.lines() {
            wait_for("the end of the tree", || !alive(pid.parse().unwrap()));
        }
    }
}

#[test]
fn kill_ends_children_in_other_sessions() {
    let fixture = Fixture::start();
    let (process, pids) = start_tree(&fixture, DEAF_TREE, 3);
    process.kill().unwrap();
    let status = process.wait().unwrap();
    assert!(matches!(status.status, ExecStatus::Signaled { signal: 9, .. }));
    for pid in pids {
        wait_for("the end of the tree", || !alive(pid));
    }
}

#[test]
fn kill_ends_what_was_orphaned_twice_where_there_are_cgroups_g9() {
    let fixture = Fixture::start();
    fixture.cgroup_place();
    let line =
        "echo $$; (setsid sh -c 'setsid sh -c \"echo \\$\\$; exec sleep 60\" & exit' &); sleep 60";
    let (process, pids) = start_tree(&fixture, line, 2);
    process.kill().unwrap();
    process.wait().unwrap();
    for pid in pids {
        wait_for("the end of the orphan", || !alive(pid));
    }
}

#[test]
fn timeout_ends_a_fork_bomb_g9() {
    let fixture = Fixture::start();
    fixture.cgroup_place();
    // It grows without an end, but gently: this machine has other work.
    let bomb = "bomb() { sleep 0.05; bomb & bomb & wait; }; trap '' TERM; bomb";
    let request = ExecRequest::shell(bomb)
        .timeout(Duration::from_millis(300))
        .grace(Duration::from_millis(100));
    let begun = Instant::now();
    let output = fixture.agent().exec(&request).unwrap();
    assert!(output.status.timed_out);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert!(fixture.agent().exec(&ExecRequest::argv(["true"])).unwrap().status.success());
}

#[test]
fn process_dropped_is_killed_and_others_go_on() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let mut process = agent.start(&ExecRequest::shell("echo $$; sleep 60")).unwrap();
    let Some(ProcessEvent::Stdout(pid)) = process.next_event(None).unwrap() else { panic!() };
    let pid = String::from_utf8(pid).unwrap().trim().parse().unwrap();
    assert!(alive(pid));
    std::mem::forget(process);
    // Another client, with a process of its own that is dropped.
    let other = fixture.agent();
    let socket = fixture.socket();
    let third = pvmm::agent::Agent::over(socket).unwrap();
    let kept = third.start(&ExecRequest::argv(["sleep", "60"])).unwrap();
    wait_for("both to run", || other.info().unwrap().execs == 2);
    drop(kept);
    wait_for("one to end", || other.info().unwrap().execs == 1);
    assert!(alive(pid));
}

#[test]
fn connection_that_breaks_takes_its_execs_along() {
    let fixture = Fixture::start();
    let socket = fixture.socket();
    let agent = pvmm::agent::Agent::over(socket.try_clone().unwrap()).unwrap();
    let mut process = agent.start(&ExecRequest::shell("echo $$; sleep 60")).unwrap();
    let Some(ProcessEvent::Stdout(pid)) = process.next_event(None).unwrap() else { panic!() };
    let pid = String::from_utf8(pid).unwrap().trim().parse().unwrap();
    socket.shutdown(std::net::Shutdown::Both).unwrap();
    wait_for("the end of the exec", || !alive(pid));
    let lost = process.next_event(None);
    assert!(matches!(lost, Err(ExecError::Agent(AgentError::Lost(Lost::Closed)))), "{lost:?}");
}

#[test]
fn agent_that_dies_is_a_typed_error_at_once_g8() {
    let mut fixture = Fixture::start();
    let agent = fixture.agent();
    let mut process = agent.start(&ExecRequest::argv(["sleep", "3"])).unwrap();
    wait_for("the start", || process.pid().is_some());
    let begun = Instant::now();
    fixture.kill();
    let lost = process.next_event(None);
    assert!(matches!(lost, Err(ExecError::Agent(AgentError::Lost(Lost::Closed)))), "{lost:?}");
    let lost = agent.exec(&ExecRequest::argv(["true"]));
    assert!(matches!(lost, Err(ExecError::Agent(AgentError::Lost(_)))), "{lost:?}");
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn cgroups_of_ended_execs_are_removed() {
    let fixture = Fixture::start();
    let place = fixture.cgroup_place();
    let agent = fixture.agent();
    for _ in 0..10 {
        agent.exec(&ExecRequest::argv(["true"])).unwrap();
    }
    agent.exec(&ExecRequest::shell("sleep 0.3 & exit")).unwrap();
    // One is kept ready for the next.
    wait_for("the last group to empty", || groups(place) == 1);
}

/// A template would keep what is left to do, and every copy of it would do it.
#[test]
fn cgroups_of_ended_execs_are_removed_before_the_workload_is_frozen() {
    let fixture = Fixture::start();
    let place = fixture.cgroup_place();
    let control = fixture.control();
    for _ in 0..3 {
        control.exec(&ExecRequest::argv(["true"])).unwrap();
    }
    control.freeze(Instant::now() + Duration::from_secs(10)).unwrap();
    assert_eq!(groups(place), 1);
}

fn groups(place: &Path) -> usize {
    std::fs::read_dir(place).unwrap().flatten().filter(|e| e.path().is_dir()).count()
}
