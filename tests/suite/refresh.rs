//! Refresh: a guest gets a new identity before its workload runs again.

use std::time::{Duration, Instant, SystemTime};

use pvmm::agent::{Agent, Refresh};
use pvmm::exec::{ExecRequest, ProcessEvent};
use pvmm_tests::guest::Guest;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn prints(agent: &Agent, line: &str) -> String {
    let output = agent.exec(&ExecRequest::shell(line)).unwrap();
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout.bytes).unwrap().trim_end().to_owned()
}

#[test]
fn frozen_workload_wakes_in_a_refreshed_guest_and_no_guest_process_can_refresh() {
    let guest = Guest::boot();
    // A process in the guest cannot use the agent's ports, whichever CID it connects to: it never
    // receives a byte.
    let code = "import socket
for port in (1024, 1026):
    for cid in (1, 3, 2):
        s = socket.socket(socket.AF_VSOCK)
        s.settimeout(10)
        try:
            s.connect((cid, port))
            s.sendall(bytes(12))
            assert s.recv(1) == b'', (cid, port)
        except OSError:
            pass
print('refused')";
    assert_eq!(guest.prints(&format!("python3 -c \"{code}\"")), "refused");

    let control = Agent::connect_control(&guest.socket(), soon()).unwrap();
    let before = prints(&control, "cat /etc/machine-id /proc/sys/kernel/random/boot_id; hostname");
    prints(&control, "date -s @1000000");
    let line = "while :; do echo $(hostname); sleep 0.05; done";
    let mut ticking = control.start(&ExecRequest::shell(line)).unwrap();
    assert!(matches!(ticking.next_event(Some(soon())), Ok(Some(ProcessEvent::Stdout(_)))));
    assert_eq!(control.freeze(soon()).unwrap().execs, 1);
    let quiet = || Some(Instant::now() + Duration::from_secs(3));
    while ticking.next_event(quiet()).unwrap().is_some() {}

    // This guest is not a fork. The earlier connection stays open, because the refresh names no new
    // generation.
    let wish = Refresh::new(0).unwrap().hostname("other").env("SEEN", "yes");
    let begun = Instant::now();
    let agent = Agent::connect_refreshed(&guest.socket(), &wish, soon()).unwrap();
    println!("connected and refreshed in {:?}", begun.elapsed());
    let told = prints(&agent, "cat /etc/machine-id /proc/sys/kernel/random/boot_id; hostname");
    for (old, new) in before.lines().rev().zip(told.lines().rev()) {
        assert_ne!(old, new);
    }
    assert!(told.ends_with("other"), "{told}");
    assert_eq!(prints(&agent, "echo $SEEN; cat /run/pvmm/generation"), "yes\n0");
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let (from, clock, to) = (now(), prints(&agent, "date +%s"), now());
    let clock: u64 = clock.parse().unwrap();
    // The nested host is slow, so the time that the request took is not counted as an error of the
    // clock.
    assert!((from.as_secs().saturating_sub(5)..=to.as_secs() + 1).contains(&clock), "{clock}");
    loop {
        match ticking.next_event(Some(soon())).unwrap() {
            Some(ProcessEvent::Stdout(bytes)) if bytes.ends_with(b"other\n") => break,
            Some(ProcessEvent::Stdout(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}
