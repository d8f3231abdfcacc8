//! Limits of a command: what it may use, what it used, and which process was killed for memory.

use pvmm::exec::{ExecRequest, Limits};
use pvmm_tests::cli::User;
use pvmm_tests::guest::Guest;

#[test]
fn limits_hold_and_the_victim_of_memory_is_named() {
    let guest = Guest::boot();
    let run = |line: &str, limits: Limits| {
        guest.agent.exec(&ExecRequest::shell(line).limits(limits)).unwrap()
    };
    let memory = Limits { memory: Some(32 << 20), ..Limits::default() };
    let output = run("exec python3 -c 'x = bytearray(200 << 20)'", memory);
    assert!(output.status.oom && output.status.shell_code() == 137, "{output:?}");
    let metrics = guest.agent.metrics().unwrap();
    assert_eq!((metrics.oom_kills, metrics.oom_events.len()), (1, 1), "{metrics:?}");
    let victim = &metrics.oom_events[0];
    assert!(victim.name == "python3" && victim.by_limit, "{victim:?}");

    // If a child is killed, the result of its parent says so too.
    let output = run("python3 -c 'x = bytearray(200 << 20)'; echo code $?", memory);
    assert!(output.status.oom && output.stdout.bytes == b"code 137\n", "{output:?}");
    // A command without limits has no such report.
    let output = guest.shell("python3 -c 'x = bytearray(60 << 20)'");
    assert!(output.status.success() && !output.status.oom, "{output:?}");

    let few = Limits { pids: Some(4), ..Limits::default() };
    let output = run("for i in 1 2 3 4 5 6 7 8; do sleep 1 & done; wait", few);
    assert!(String::from_utf8_lossy(&output.stderr.bytes).contains("fork"), "{output:?}");

    // With a tenth of a processor, a busy program takes far longer than its processor time.
    let slow = Limits { cpu_milli: Some(100), ..Limits::default() };
    let line = "import time; t = time.process_time() + 0.3\nwhile time.process_time() < t: pass";
    let output =
        guest.agent.exec(&ExecRequest::argv(["python3", "-c", line]).limits(slow)).unwrap();
    let used = output.status.usage.user_us + output.status.usage.system_us;
    assert!(output.status.duration.as_micros() as u64 > 4 * used, "{:?}", output.status);
}

#[test]
fn stats_of_a_vm_and_the_remark_on_a_killed_command() {
    let user = User::new();
    let vm = user.detached(&[]);
    let eat = "x = bytearray(200 << 20)";
    let said = user.pvmm(["exec", "--memory", "32M", &vm, "--", "python3", "-c", eat]);
    assert_eq!(said.code, Some(137), "{said:?}");
    assert!(said.stderr.contains("out of memory") && said.stderr.contains("python3"), "{said:?}");
    let stats = user.pvmm(["stats", "--json", &vm]);
    let stats: serde_json::Value = serde_json::from_slice(&stats.stdout).unwrap();
    assert_eq!(stats["oom_events"][0]["name"], "python3");
    assert!(stats["memory_total"].as_u64() > Some(400 << 20), "{stats}");
    assert!(user.pvmm(["stats", &vm]).text().contains("OOM KILLS"));
    assert_eq!(user.pvmm(["kill", &vm]).code, Some(0));
}

#[test]
fn top_shows_each_vm_with_its_memory_and_its_forks() {
    let user = User::new();
    let vm = user.detached(&["--name", "parent"]);
    let fork = user.pvmm(["fork", "parent"]);
    assert_eq!(fork.code, Some(0), "{fork:?}");
    let said = user.pvmm(["top", "--json"]);
    let rows: Vec<serde_json::Value> = serde_json::from_str(said.text()).unwrap();
    assert_eq!(rows.len(), 2, "{rows:?}");
    assert!(rows.iter().all(|row| row["memory_private"].as_u64().unwrap() > 1 << 20), "{rows:?}");
    assert!(rows.iter().all(|row| row["memory_shared"].as_u64().unwrap() > 0), "{rows:?}");
    let parent = rows.iter().find(|row| row["id"] == vm.as_str()).unwrap();
    assert_eq!((&parent["forks"], &parent["state"]), (&1.into(), &"running".into()));
    let frame = user.pvmm(["top", "--once"]);
    assert!(frame.text().starts_with("2 VMs, 2 alive; "), "{}", frame.text());
    assert_eq!(user.pvmm(["kill", &vm, fork.text()]).code, Some(0));
}
