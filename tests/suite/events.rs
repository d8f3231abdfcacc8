//! `pvmm events`, with real guests.

use std::io::{BufRead, BufReader};

use pvmm_tests::cli::User;
use serde_json::Value;

#[test]
fn events_tell_each_change_of_a_vm_and_the_reason_of_its_end() {
    let user = User::new();
    let mut child = user.spawn(["events", "--json"]);
    let mut remarks = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(remarks.next().unwrap().unwrap().starts_with("watching"));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = |kind: &str| {
        let events =
            lines.by_ref().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        events.into_iter().find(|event| event["event"] == kind).unwrap()
    };
    let vm = user.detached(&["--name", "seen", "--ttl", "1h"]);
    assert_eq!((&next("running")["id"], &vm), (&vm.as_str().into(), &vm));
    user.pvmm(["pause", &vm]);
    next("paused");
    user.pvmm(["resume", &vm]);
    user.pvmm(["ttl", &vm, "1s"]);
    let ended = next("exited");
    assert!(ended["detail"].as_str().unwrap().contains("(ttl)"), "{ended}");
    user.pvmm(["rm", &vm]);
    assert_eq!(next("removed")["name"], "seen");
    child.kill().unwrap();
    child.wait().unwrap();
}
