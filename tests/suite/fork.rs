//! Forks of a running VM, and rollbacks to a checkpoint.

use std::collections::BTreeSet;
use std::time::Instant;

use pvmm::agent::{Agent, CodeRequest, Language, SessionOptions};
use pvmm_tests::census::Census;
use pvmm_tests::child::{Child, SOON, prints};
use pvmm_tests::guest::Guest;

#[test]
fn forks_of_a_running_machine_go_on_apart_and_outlive_it() {
    let mut guest = Guest::boot();
    guest.prints("echo before > /tmp/word");
    let template = guest.vm.freeze().expect("freeze");
    let (one, two) = (Child::of(&template), Child::of(&template));
    assert_eq!(one.prints("cat /tmp/word"), "before");
    one.prints("echo one > /tmp/word");
    two.prints("echo two > /tmp/word");
    let agent = guest.vm.agent(Instant::now() + SOON).expect("the parent's agent");
    assert_eq!(prints(&agent, "cat /tmp/word"), "before");
    drop((guest, template));
    assert_eq!(
        (one.prints("cat /tmp/word"), two.prints("cat /tmp/word")),
        ("one".into(), "two".into())
    );
}

#[test]
fn forks_differ_in_everything_that_must_differ() {
    let mut guest = Guest::boot();
    let line =
        "cat /proc/sys/kernel/random/boot_id /etc/machine-id; head -c16 /dev/urandom | od -An -tx1";
    // The identifier is read before the freeze, because the kernel makes it at the first read.
    let mut seen = BTreeSet::from([guest.prints("cat /proc/sys/kernel/random/boot_id")]);
    let control = Agent::connect_control(&guest.socket(), Instant::now() + SOON).expect("control");
    control.freeze(Instant::now() + SOON).expect("freeze the workload");
    let template = guest.vm.freeze().expect("freeze");
    drop(guest);
    for _ in 0..8 {
        seen.extend(Child::of(&template).prints(line).lines().map(str::to_owned));
    }
    assert_eq!(seen.len(), 25, "{seen:?}");
}

#[test]
fn rollback_returns_to_the_checkpoint_as_often_as_it_is_asked() {
    let mut guest = Guest::boot();
    guest.prints("echo 0 > /tmp/n");
    guest.vm.checkpoint().expect("checkpoint");
    for round in 1..5 {
        let agent = guest.vm.agent(Instant::now() + SOON).expect("agent");
        assert_eq!(prints(&agent, "cat /tmp/n"), "0");
        prints(&agent, &format!("echo {round} > /tmp/n"));
        if round == 2 {
            // The rollback goes back beyond a freeze.
            guest.vm.freeze().expect("freeze");
            prints(&agent, "echo later > /tmp/n");
        }
        guest.vm.rollback().expect("rollback");
    }
    // A rollback also works after the guest has ended.
    let agent = guest.vm.agent(Instant::now() + SOON).expect("agent");
    agent.shutdown(pvmm::agent::ShutdownHow::Poweroff, None).expect("shutdown");
    assert!(guest.vm.wait(Some(SOON)).is_some());
    guest.vm.rollback().expect("rollback after the end");
    assert!(guest.vm.wait(Some(std::time::Duration::ZERO)).is_none());
    let agent = guest.vm.agent(Instant::now() + SOON).expect("agent");
    assert_eq!(prints(&agent, "cat /tmp/n"), "0");
}

/// The data of an interpreter is in every fork, and costs no memory until the fork writes it.
#[test]
fn forks_of_a_session_with_500_mib_share_all_of_it() {
    let mut guest = Guest::boot_with(|config| config.memory_mib = 1024);
    let run = |agent: &Agent, code: &str| {
        let request = CodeRequest::new(code).timeout(SOON);
        let output = agent.run_code("data", &request).expect("code");
        output.result.and_then(|result| result.text("text/plain")).unwrap_or_default()
    };
    guest.agent.open_session(&SessionOptions::named(Language::Python, "data")).expect("session");
    run(&guest.agent, "import os\ndata = [bytearray(os.urandom(4096) * 256) for _ in range(500)]");
    let template = guest.vm.freeze().expect("freeze");
    let mib = |kib: u64| kib as f64 / 1024.0;
    let before = Census::take().private_kib;
    let forks: Vec<_> = (0..10).map(|_| Child::paused(&template)).collect();
    let added = mib(Census::take().private_kib.saturating_sub(before));
    assert!(added < 10.0, "ten forks take {added:.1} MiB");
    let forks: Vec<_> = forks.into_iter().map(Child::resumed).collect();
    for fork in &forks {
        assert_eq!(run(&fork.agent, "sum(len(d) for d in data) >> 20"), "500");
    }
    let used = mib(Census::take().private_kib.saturating_sub(before));
    println!("ten forks of 500 MiB take {added:.1} MiB, and {used:.1} after each has looked at it");
    assert!(used < 100.0, "ten forks that have answered take {used:.1} MiB");
}
