//! A running machine forked, and taken back to its checkpoint.

use std::collections::BTreeSet;
use std::time::Instant;

use pvmm::agent::Agent;
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
    let control = Agent::connect_control(&guest.socket(), Instant::now() + SOON).expect("control");
    control.freeze(Instant::now() + SOON).expect("freeze the workload");
    let template = guest.vm.freeze().expect("freeze");
    drop(guest);
    let line =
        "cat /proc/sys/kernel/random/boot_id /etc/machine-id; head -c16 /dev/urandom | od -An -tx1";
    let mut seen = BTreeSet::new();
    for _ in 0..8 {
        seen.extend(Child::of(&template).prints(line).lines().map(str::to_owned));
    }
    assert_eq!(seen.len(), 24, "{seen:?}");
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
            // Back over what was frozen meanwhile.
            guest.vm.freeze().expect("freeze");
            prints(&agent, "echo later > /tmp/n");
        }
        guest.vm.rollback().expect("rollback");
    }
    // A guest that has ended comes back to life.
    let agent = guest.vm.agent(Instant::now() + SOON).expect("agent");
    agent.shutdown(pvmm::agent::ShutdownHow::Poweroff, None).expect("shutdown");
    assert!(guest.vm.wait(Some(SOON)).is_some());
    guest.vm.rollback().expect("rollback after the end");
    assert!(guest.vm.wait(Some(std::time::Duration::ZERO)).is_none());
    let agent = guest.vm.agent(Instant::now() + SOON).expect("agent");
    assert_eq!(prints(&agent, "cat /tmp/n"), "0");
}
