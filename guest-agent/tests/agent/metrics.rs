//! The resources that a guest uses, and that an exec may use.
//! Limits themselves need a kernel with all controllers of cgroup v2: the suite has one.

use pvmm::exec::{ExecRequest, ExecStatus, Limits, Stage};

use crate::fixture::Fixture;

#[test]
fn metrics_are_those_of_this_machine() {
    let fixture = Fixture::start();
    let agent = fixture.agent();
    let before = agent.metrics().unwrap();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let total = format!("{} kB", before.memory_total_kib);
    assert!(meminfo.lines().next().unwrap().ends_with(&total), "{total}");
    assert!(before.cpus > 0 && before.processes > 1 && before.disk_total_bytes > 0, "{before:?}");
    assert!((1..=before.memory_total_kib).contains(&before.memory_available_kib), "{before:?}");
    assert!((1..=before.disk_total_bytes).contains(&before.disk_available_bytes), "{before:?}");
    let busy = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";
    agent.exec(&ExecRequest::shell(busy)).unwrap();
    let after = agent.metrics().unwrap();
    assert!(after.cpu_busy_us > before.cpu_busy_us && after.uptime_us > before.uptime_us);
}

#[test]
fn exec_whose_limits_cannot_be_kept_is_not_started() {
    let fixture = Fixture::start_without_cgroups();
    let limits = Limits { pids: Some(5), ..Limits::default() };
    let file = fixture.path("started");
    let request = ExecRequest::shell(format!("touch {}", file.display())).limits(limits);
    let output = fixture.agent().exec(&request).unwrap();
    assert!(
        matches!(output.status.status, ExecStatus::CouldNotStart { stage: Stage::Limits, .. }),
        "{output:?}"
    );
    assert!(!file.exists());
}

#[test]
fn limits_that_let_nothing_run_are_refused() {
    let agent = Fixture::start();
    let agent = agent.agent();
    for limits in [
        Limits { pids: Some(0), ..Limits::default() },
        Limits { memory: Some(4096), ..Limits::default() },
        Limits { cpu_milli: Some(0), ..Limits::default() },
    ] {
        assert!(agent.exec(&ExecRequest::argv(["true"]).limits(limits)).is_err(), "{limits:?}");
    }
}
