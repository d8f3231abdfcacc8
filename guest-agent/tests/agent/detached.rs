//! Processes that outlive their client: replayed, followed, signalled, forgotten, bounded.

use std::io::Write;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, AgentError};
use pvmm::exec::{
    AttachFrom, ExecError, ExecRequest, ExecStatus, ExitStatus, Process, ProcessEvent, WindowSize,
};
use pvmm_guest_agent::limits::MAX_DETACHED;

use crate::fixture::{Fixture, wait_for};

const ESRCH: i32 = 3;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn start(agent: &Agent, line: &str) -> u64 {
    agent.start_detached(&ExecRequest::shell(line), None).unwrap().id
}

/// Everything it says to its end.
fn follow(mut process: Process) -> (String, ExitStatus) {
    let mut text = String::new();
    loop {
        match process.next_event(Some(soon())).unwrap() {
            Some(ProcessEvent::Stdout(bytes) | ProcessEvent::Stderr(bytes)) => {
                text += &String::from_utf8_lossy(&bytes);
            }
            Some(ProcessEvent::Exited(status)) => return (text, status),
            None => panic!("it did not end after {text:?}"),
        }
    }
}

fn replayed(agent: &Agent, id: u64, stdout: u64) -> (String, ExitStatus) {
    follow(agent.attach(id, AttachFrom { stdout, ..AttachFrom::default() }).unwrap())
}

fn has_ended(agent: &Agent, id: u64) -> bool {
    agent.processes().unwrap().iter().any(|it| it.id == id && it.ended.is_some())
}

#[test]
fn detached_process_outlives_its_client_and_is_replayed_from_any_offset() {
    let fixture = Fixture::start();
    let first = fixture.agent();
    let go = fixture.path("go");
    let line =
        format!("echo one; echo two; until [ -e {} ]; do sleep 0.01; done; exit 3", go.display());
    let id = start(&first, &line);
    drop(first);
    let agent = fixture.agent();
    let mut following =
        agent.attach(id, AttachFrom { stdout: 4, ..AttachFrom::default() }).unwrap();
    let replay = following.replay(soon()).unwrap().unwrap();
    assert_eq!((replay.stdout_from, replay.terminal), (4, false));
    let two = following.next_event(Some(soon())).unwrap();
    assert_eq!(two, Some(ProcessEvent::Stdout(b"two\n".to_vec())));
    let listed = agent.processes().unwrap();
    assert_eq!(listed.len(), 1);
    assert!(listed[0].command.starts_with("echo one") && listed[0].attached == 1, "{listed:?}");
    // Looking away changes nothing; neither does the end of the process for those who come later.
    drop(following);
    std::fs::write(&go, "").unwrap();
    wait_for("its end", || has_ended(&agent, id));
    for (from, text) in [(0, "one\ntwo\n"), (4, "two\n"), (8, ""), (1000, "")] {
        let (said, status) = replayed(&agent, id, from);
        assert_eq!((said.as_str(), status.shell_code()), (text, 3));
    }
    agent.forget_process(id).unwrap();
    assert!(agent.processes().unwrap().is_empty());
    let gone = agent.attach(id, AttachFrom::default()).unwrap().wait();
    let Err(ExecError::Agent(gone)) = gone else { panic!("{gone:?}") };
    assert_eq!(gone.errno(), Some(ESRCH));
}

#[test]
fn output_beyond_the_ring_is_lost_counted_and_never_stops_the_process() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let request = ExecRequest::shell("seq 100000; echo end >&2");
    let id = agent.start_detached(&request, Some(1000)).unwrap().id;
    wait_for("its end", || has_ended(&agent, id));
    let all: String = (1..=100_000).map(|n| format!("{n}\n")).collect();
    let process = agent.attach(id, AttachFrom::default()).unwrap();
    let replay = process.replay(soon()).unwrap().unwrap();
    assert_eq!(replay.stdout_from, all.len() as u64 - 1000);
    let (said, status) = follow(process);
    assert_eq!(said.replace("end\n", ""), all[all.len() - 1000..]);
    assert_eq!(
        (status.stdout.total, status.stdout.dropped),
        (all.len() as u64, replay.stdout_from)
    );
    assert_eq!((status.stderr.total, status.stderr.dropped), (4, 0));
}

#[test]
fn follower_that_does_not_read_hurts_neither_process_nor_others() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let id = start(&agent, "sleep 0.2; seq 300000; echo done");
    let lazy = fixture.agent();
    let mut idle = lazy.attach(id, AttachFrom::default()).unwrap();
    assert_eq!(idle.next_event(Some(Instant::now())).unwrap(), None);
    wait_for("its end", || has_ended(&agent, id));
    let (said, status) = follow(idle);
    // What it took before it fell behind, then a gap that is told, then the newest.
    assert!(said.ends_with("300000\ndone\n"));
    assert_eq!(said.len() as u64 + status.stdout.dropped, status.stdout.total);
}

#[test]
fn signals_reach_a_detached_process_and_its_tree() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let id = start(
        &agent,
        "exec 2>/dev/null; trap 'echo hup' HUP; echo up; while :; do sleep 0.02; done",
    );
    let mut process = agent.attach(id, AttachFrom::default()).unwrap();
    assert!(matches!(process.next_event(Some(soon())), Ok(Some(ProcessEvent::Stdout(_)))));
    agent.signal_process(id, 1, false).unwrap();
    assert!(matches!(process.next_event(Some(soon())), Ok(Some(ProcessEvent::Stdout(_)))));
    agent.signal_process(id, 9, true).unwrap();
    assert!(matches!(process.wait().unwrap().status, ExecStatus::Signaled { signal: 9, .. }));
    assert!(agent.signal_process(id, 0, false).is_err());
    assert!(agent.signal_process(99_999, 9, true).is_err());
    // A whole tree ends, not only its root.
    let id = start(&agent, "sleep 60 & echo $!; wait");
    let mut process = agent.attach(id, AttachFrom::default()).unwrap();
    let Ok(Some(ProcessEvent::Stdout(child))) = process.next_event(Some(soon())) else { panic!() };
    let child = format!("/proc/{}", String::from_utf8(child).unwrap().trim());
    agent.signal_process(id, 9, true).unwrap();
    wait_for("the end of its child", || !std::path::Path::new(&child).exists());
    // To forget one that runs is to kill it.
    let id = start(&agent, "sleep 60");
    agent.forget_process(id).unwrap();
    wait_for("its end", || agent.info().unwrap().execs == 0);
}

#[test]
fn rest_of_an_ended_process_goes_on_if_it_may() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    for leave in [true, false] {
        let id = start(&agent, "sleep 60 >/dev/null 2>&1 & echo $!");
        wait_for("its end", || has_ended(&agent, id));
        let child = format!("/proc/{}", replayed(&agent, id, 0).0.trim());
        if leave {
            agent.leave_process(id).unwrap();
            assert!(agent.processes().unwrap().is_empty() && std::path::Path::new(&child).exists());
        } else if agent.info().unwrap().cgroups {
            agent.forget_process(id).unwrap();
            wait_for("the end of the rest", || !std::path::Path::new(&child).exists());
        }
    }
}

#[test]
fn end_of_a_process_that_closed_its_outputs_is_told_to_who_waits() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let id = start(&agent, "exec >/dev/null 2>&1; sleep 0.5; exit 6");
    let (said, status) = replayed(&agent, id, 0);
    assert_eq!((said.as_str(), status.shell_code()), ("", 6));
}

#[test]
fn input_of_a_detached_process_comes_from_whoever_attaches() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let request = ExecRequest::argv(["cat"]).piped_stdin();
    let id = agent.start_detached(&request, None).unwrap().id;
    let with_input = AttachFrom { input: true, ..AttachFrom::default() };
    let mut seen = 0;
    for word in ["one ", "two "] {
        let mut process = agent.attach(id, with_input).unwrap();
        let mut stdin = process.take_stdin().unwrap();
        stdin.write_all(word.as_bytes()).unwrap();
        // Not closed: its client merely goes away.
        std::mem::forget(stdin);
        seen += word.len() as u64;
        wait_for("the words", || agent.processes().unwrap()[0].stdout.to >= seen);
    }
    let mut last = agent.attach(id, with_input).unwrap();
    drop(last.take_stdin());
    let (said, status) = follow(last);
    assert_eq!((said.as_str(), status.shell_code()), ("one two ", 0));
}

#[test]
fn terminal_of_a_detached_process_is_attached_to_and_resized() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let size = WindowSize { rows: 24, columns: 80 };
    let request = ExecRequest::argv(["sh"]).env("PS1", "$ ").terminal(size);
    let id = agent.start_detached(&request, None).unwrap().id;
    let mut process =
        agent.attach(id, AttachFrom { input: true, ..AttachFrom::default() }).unwrap();
    assert!(process.replay(soon()).unwrap().unwrap().terminal);
    process.signaller().resize(WindowSize { rows: 9, columns: 99 }).unwrap();
    let mut keys = process.take_stdin().unwrap();
    keys.write_all(b"stty size; exit 4\r").unwrap();
    let (said, status) = follow(process);
    assert!(said.contains("9 99"), "{said}");
    assert_eq!(status.shell_code(), 4);
}

#[test]
fn detached_processes_are_bounded_and_ended_ones_make_room() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let short = start(&agent, "true");
    wait_for("its end", || has_ended(&agent, short));
    let ids: Vec<u64> = (0..MAX_DETACHED).map(|_| start(&agent, "exec sleep 60")).collect();
    assert!(agent.processes().unwrap().iter().all(|it| it.id != short));
    let refused = agent.start_detached(&ExecRequest::argv(["true"]), None);
    assert!(matches!(refused, Err(ExecError::Agent(AgentError::TooMany))), "{refused:?}");
    for id in ids {
        agent.forget_process(id).unwrap();
    }
    start(&agent, "true");
}

#[test]
fn detached_process_that_cannot_start_or_runs_out_of_time_says_so() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let missing = agent.start_detached(&ExecRequest::argv(["no-such-program"]), None);
    let Err(ExecError::NotStarted(status)) = missing else { panic!("{missing:?}") };
    assert_eq!(status.shell_code(), 127);
    let request = ExecRequest::argv(["sleep", "60"]).timeout(Duration::from_millis(100));
    let id = agent.start_detached(&request, None).unwrap().id;
    let (_, status) = replayed(&agent, id, 0);
    assert!(status.timed_out && status.shell_code() == 124, "{status:?}");
}
