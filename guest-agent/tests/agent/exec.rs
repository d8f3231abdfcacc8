//! Running commands: what comes out and how they end.

use std::time::{Duration, Instant};

use pvmm::agent::AgentError;
use pvmm::exec::{ExecError, ExecRequest, ExecStatus, OutputCap, ProcessEvent, Stage};

use crate::fixture::Fixture;

fn run(fixture: &Fixture, line: &str) -> (String, String, u8) {
    let output = fixture.agent().exec(&ExecRequest::shell(line)).unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (text(output.stdout.bytes), text(output.stderr.bytes), output.status.shell_code())
}

#[test]
fn exec_argv_gives_output_and_code() {
    let fixture = Fixture::start();
    let request = ExecRequest::argv(["sh", "-c", "echo out; echo err >&2; exit 7"]);
    let output = fixture.agent().exec(&request).unwrap();
    assert_eq!(output.stdout.bytes, b"out\n");
    assert_eq!(output.stderr.bytes, b"err\n");
    assert_eq!(output.status.status, ExecStatus::Exited { code: 7 });
    assert_eq!(output.status.shell_code(), 7);
    assert_eq!((output.status.stdout.total, output.status.stderr.total), (4, 4));
}

#[test]
fn exec_environment_is_small_and_known() {
    let fixture = Fixture::start();
    let request = ExecRequest::argv(["env"]).env("A", "1").env("TERM", "dumb");
    let output = fixture.agent().exec(&request).unwrap();
    let text = String::from_utf8(output.stdout.bytes).unwrap();
    let mut names: Vec<&str> = text.lines().filter_map(|l| l.split('=').next()).collect();
    names.sort();
    assert_eq!(names, ["A", "HOME", "LANG", "PATH", "TERM", "USER"]);
    assert!(text.contains("TERM=dumb\n"), "{text}");
    let bare = ExecRequest::argv(["/usr/bin/env"]).clear_env().env("ONLY", "me");
    assert_eq!(fixture.agent().exec(&bare).unwrap().stdout.bytes, b"ONLY=me\n");
}

#[test]
fn exec_cwd_is_entered() {
    let fixture = Fixture::start();
    let request = ExecRequest::argv(["pwd"]).cwd("/usr/bin");
    assert_eq!(fixture.agent().exec(&request).unwrap().stdout.bytes, b"/usr/bin\n");
    assert_eq!(run(&fixture, "pwd").0, "/\n");
}

#[test]
fn exec_user_is_taken_on_with_its_groups() {
    let fixture = Fixture::start();
    assert!(is_root(), "only root can become another user: run this test as root");
    let request = ExecRequest::shell("id -u; id -g; echo $HOME; echo $USER").user("daemon");
    let output = fixture.agent().exec(&request).unwrap();
    assert_eq!(output.stdout.bytes, b"1\n1\n/usr/sbin\ndaemon\n");
    let request = ExecRequest::shell("id -u; id -g; id -G").user("4321:1234");
    assert_eq!(fixture.agent().exec(&request).unwrap().stdout.bytes, b"4321\n1234\n1234\n");
}

fn is_root() -> bool {
    std::process::Command::new("id").arg("-u").output().unwrap().stdout == b"0\n"
}

#[test]
fn exec_bytes_that_are_no_text_come_through_g6() {
    use std::os::unix::ffi::OsStrExt;
    let fixture = Fixture::start();
    let odd = std::ffi::OsStr::from_bytes(b"\xff\x1b[31m\n{\"");
    let request = ExecRequest::argv(["printf".as_ref(), "%s".as_ref(), odd]);
    assert_eq!(fixture.agent().exec(&request).unwrap().stdout.bytes, odd.as_bytes());
    let nul = fixture.agent().exec(&ExecRequest::shell("printf 'a\\000b'")).unwrap();
    assert_eq!(nul.stdout.bytes, b"a\0b");
}

#[test]
fn exec_signal_death_is_told_from_exit_g10() {
    let fixture = Fixture::start();
    let output = fixture.agent().exec(&ExecRequest::shell("kill -9 $$")).unwrap();
    assert!(matches!(output.status.status, ExecStatus::Signaled { signal: 9, .. }));
    assert_eq!(output.status.shell_code(), 137);
    let output = fixture.agent().exec(&ExecRequest::shell("exit 137")).unwrap();
    assert_eq!(output.status.status, ExecStatus::Exited { code: 137 });
}

#[test]
fn exec_that_cannot_start_says_where_and_why() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let plain = fixture.path("plain");
    std::fs::write(&plain, "x").unwrap();
    let cases = [
        (ExecRequest::argv(["no-such-program"]), Stage::Exec, libc::ENOENT, 127),
        (ExecRequest::argv([&plain]), Stage::Exec, libc::EACCES, 126),
        (ExecRequest::argv(["true"]).cwd("/no/such/dir"), Stage::Chdir, libc::ENOENT, 126),
        (ExecRequest::argv(["true"]).user("no-such-user"), Stage::User, libc::ENOENT, 126),
    ];
    for (request, stage, errno, code) in cases {
        let output = agent.exec(&request).unwrap();
        assert_eq!(output.status.status, ExecStatus::CouldNotStart { stage, errno });
        assert_eq!(output.status.shell_code(), code);
    }
    assert_eq!(agent.info().unwrap().execs, 0);
}

#[test]
fn exec_script_without_interpreter_runs_in_the_shell() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::start();
    let script = fixture.path("script");
    std::fs::write(&script, "echo script $1\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let request = ExecRequest::argv([script.as_os_str(), "arg".as_ref()]);
    assert_eq!(fixture.agent().exec(&request).unwrap().stdout.bytes, b"script arg\n");
}

#[test]
fn exec_stdin_is_empty_unless_asked_for() {
    let fixture = Fixture::start();
    assert_eq!(run(&fixture, "wc -c"), ("0\n".into(), String::new(), 0));
    let request = ExecRequest::argv(["cat"]).input("hello");
    assert_eq!(fixture.agent().exec(&request).unwrap().stdout.bytes, b"hello");
    let request = ExecRequest::argv(["cat"]).input("");
    assert_eq!(fixture.agent().exec(&request).unwrap().stdout.bytes, b"");
}

#[test]
fn exec_that_does_not_read_its_input_still_ends() {
    let fixture = Fixture::start();
    let request = ExecRequest::argv(["true"]).input(vec![b'x'; 8 << 20]);
    assert!(fixture.agent().exec(&request).unwrap().status.success());
    let request = ExecRequest::shell("exec <&-; sleep 0.2; echo on").input(vec![b'x'; 8 << 20]);
    assert_eq!(fixture.agent().exec(&request).unwrap().stdout.bytes, b"on\n");
}

#[test]
fn exec_output_over_the_cap_keeps_head_and_tail_g5() {
    let fixture = Fixture::start();
    let cap = OutputCap { head: 100_000, tail: 1000 };
    let request = ExecRequest::shell("seq 1 2000000").output_cap(cap);
    let output = fixture.agent().exec(&request).unwrap();
    let whole: String = (1..=2_000_000).map(|n| format!("{n}\n")).collect();
    let (whole, kept) = (whole.as_bytes(), &output.stdout.bytes);
    assert_eq!(kept.len(), 101_000);
    assert_eq!(kept[..100_000], whole[..100_000]);
    assert_eq!(kept[100_000..], whole[whole.len() - 1000..]);
    assert_eq!(output.stdout.total, whole.len() as u64);
    assert_eq!(output.stdout.dropped, whole.len() as u64 - 101_000);
    assert!(output.stdout.truncated() && !output.stderr.truncated());
}

#[test]
fn exec_background_child_holding_the_pipe_does_not_hold_the_exit() {
    let fixture = Fixture::start();
    let begun = Instant::now();
    let output = fixture.agent().exec(&ExecRequest::shell("echo a; sleep 30 & exit 3")).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(output.stdout.bytes, b"a\n");
    assert_eq!(output.status.status, ExecStatus::Exited { code: 3 });
    assert!(output.status.background);
}

#[test]
fn exec_background_child_that_writes_on_does_not_hold_the_exit() {
    let fixture = Fixture::start();
    let begun = Instant::now();
    let output = fixture.agent().exec(&ExecRequest::shell("yes & exit 0")).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert!(output.status.background);
}

#[test]
fn exec_signal_reaches_the_process_group() {
    let fixture = Fixture::start();
    let line = "trap 'echo got; exit 5' USR1; echo up; while :; do sleep 0.01; done";
    let mut process = fixture.agent().start(&ExecRequest::shell(line)).unwrap();
    assert_eq!(process.next_event(None).unwrap(), Some(ProcessEvent::Stdout(b"up\n".to_vec())));
    assert!(process.pid().is_some());
    process.signal(libc::SIGUSR1).unwrap();
    let mut output = Vec::new();
    let status = loop {
        match process.next_event(None).unwrap().unwrap() {
            ProcessEvent::Stdout(bytes) => output.extend(bytes),
            ProcessEvent::Stderr(_) => {}
            ProcessEvent::Exited(status) => break status,
        }
    };
    assert_eq!(status.status, ExecStatus::Exited { code: 5 });
    assert_eq!(output, b"got\n");
}

#[test]
fn exec_event_deadline_gives_nothing_and_the_process_goes_on() {
    let fixture = Fixture::start();
    let mut process = fixture.agent().start(&ExecRequest::shell("sleep 0.3; echo x")).unwrap();
    let soon = Instant::now() + Duration::from_millis(50);
    assert_eq!(process.next_event(Some(soon)).unwrap(), None);
    assert_eq!(process.next_event(None).unwrap(), Some(ProcessEvent::Stdout(b"x\n".to_vec())));
    assert!(process.wait().unwrap().success());
}

#[test]
fn exec_time_limit_terminates_and_keeps_the_output() {
    let fixture = Fixture::start();
    let begun = Instant::now();
    let request = ExecRequest::shell("echo before; sleep 60").timeout(Duration::from_millis(200));
    let output = fixture.agent().exec(&request).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(output.stdout.bytes, b"before\n");
    assert!(output.status.timed_out);
    assert_eq!(output.status.shell_code(), 124);
    assert!(matches!(output.status.status, ExecStatus::Signaled { signal: 15, .. }));
}

#[test]
fn exec_usage_and_duration_are_measured() {
    let fixture = Fixture::start();
    let line = "i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done; sleep 0.1";
    let status = fixture.agent().exec(&ExecRequest::shell(line)).unwrap().status;
    assert!(status.duration >= Duration::from_millis(100));
    assert!(status.usage.user_us + status.usage.system_us > 1000, "{:?}", status.usage);
    assert!(status.usage.max_rss_kib > 100);
}

#[test]
fn exec_request_that_no_guest_could_run_is_refused_g13() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let long = "x".repeat(800 << 10);
    let cases = [
        (ExecRequest::argv(Vec::<String>::new()), "argv"),
        (ExecRequest::argv([""]), "argv"),
        (ExecRequest::argv(["a\0b"]), "argv"),
        (ExecRequest::shell("a\0b"), "argv"),
        (ExecRequest::argv(["true"]).env("A\0", "1"), "env"),
        (ExecRequest::argv(["true"]).env("A=B", "1"), "env"),
        (ExecRequest::argv(["true"]).env("", "1"), "env"),
        (ExecRequest::argv(["true", &long]), "argv"),
        (ExecRequest::argv(["true"]).cwd("/a\0b"), "cwd"),
        (ExecRequest::argv(["true"]).user(""), "user"),
    ];
    for (request, expected) in cases {
        match agent.exec(&request) {
            Err(ExecError::InvalidRequest { field, .. }) => assert_eq!(field, expected),
            other => panic!("{other:?}"),
        }
    }
    // One argument beyond the kernel's own limit is the guest's to refuse.
    let argument = "x".repeat(200 << 10);
    let status = agent.exec(&ExecRequest::argv(["true", &argument])).unwrap().status.status;
    assert_eq!(status, ExecStatus::CouldNotStart { stage: Stage::Exec, errno: libc::E2BIG });
}

#[test]
fn shutdown_under_another_init_is_refused() {
    let fixture = Fixture::start();
    let how = pvmm::agent::ShutdownHow::Poweroff;
    let refused = fixture.agent().shutdown(how, None);
    assert!(matches!(refused, Err(AgentError::Refused(_))), "{refused:?}");
}

#[test]
fn info_and_ping_answer() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    agent.ping(Instant::now() + Duration::from_secs(5)).unwrap();
    let info = agent.info().unwrap();
    assert!(info.memory_total_kib > 0 && info.cpus > 0);
    assert_eq!(info.cgroups, fixture.has_cgroups());
    assert!(!agent.welcome().init);
}
