//! A running machine forked, and taken back to its checkpoint.

use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::exec::ExecRequest;
use pvmm::{Overrides, Template, Vm, Vsock};
use pvmm_tests::guest::Guest;
use tempfile::TempDir;

const SOON: Duration = Duration::from_secs(60);

/// A child of a template, running.
struct Child {
    vm: Vm,
    agent: Agent,
    _dir: TempDir,
}

impl Child {
    fn of(template: &Template) -> Self {
        let dir = TempDir::new().expect("temporary directory");
        let vsock = Some(Vsock { guest_cid: 3, uds_path: dir.path().join("v") });
        let mut vm = template.fork(Overrides { vsock, ..Default::default() }).expect("fork");
        vm.resume().expect("resume");
        let agent = vm.agent(Instant::now() + SOON).expect("agent");
        Self { vm, agent, _dir: dir }
    }

    fn prints(&self, line: &str) -> String {
        prints(&self.agent, line)
    }
}

fn prints(agent: &Agent, line: &str) -> String {
    let output = agent.exec(&ExecRequest::shell(line).timeout(SOON)).expect("exec");
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8_lossy(&output.stdout.bytes).trim_end().to_owned()
}

#[test]
fn forks_of_a_running_machine_go_on_apart() {
    let mut guest = Guest::boot();
    guest.prints("echo before > /tmp/word; sync");
    let begun = Instant::now();
    let template = guest.vm.freeze().expect("freeze");
    eprintln!("freeze {:?}", begun.elapsed());
    let begun = Instant::now();
    let one = Child::of(&template);
    eprintln!("child up {:?}", begun.elapsed());
    let two = Child::of(&template);
    assert_eq!(one.prints("cat /tmp/word"), "before");
    one.prints("echo one > /tmp/word");
    two.prints("echo two > /tmp/word");
    assert_eq!(one.prints("cat /tmp/word; sleep 1"), "one");
    assert_eq!(two.prints("cat /tmp/word"), "two");
    let agent = guest.vm.agent(Instant::now() + SOON).expect("the parent's agent");
    assert_eq!(prints(&agent, "cat /tmp/word"), "before");
    drop(guest);
    assert_eq!(one.prints("cat /tmp/word"), "one");
    drop(one.vm);
}

#[test]
fn rollback_returns_to_the_checkpoint_as_often_as_it_is_asked() {
    let mut guest = Guest::boot();
    guest.prints("echo 0 > /tmp/n");
    guest.vm.checkpoint().expect("checkpoint");
    for round in 1..4 {
        let agent = guest.vm.agent(Instant::now() + SOON).expect("agent");
        assert_eq!(prints(&agent, "cat /tmp/n"), "0");
        prints(&agent, &format!("echo {round} > /tmp/n"));
        let begun = Instant::now();
        guest.vm.rollback().expect("rollback");
        eprintln!("rollback {:?}", begun.elapsed());
    }
}
