//! Activities of a guest continue in its forks and restores: processes, terminals, sleeps,
//! connections to the host.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use pvmm::agent::Agent;
use pvmm::exec::{AttachFrom, ExecRequest, Process, ProcessEvent, WindowSize};
use pvmm::snapshot::{LoadOptions, WriteOptions};
use pvmm::{Kvm, Template};
use pvmm_tests::child::{Child, SOON};
use pvmm_tests::clock::check_clock;
use pvmm_tests::guest::Guest;
use tempfile::TempDir;

/// Freezes a running guest. Returns its template, and the template after it was written to disk and
/// loaded.
fn copies(guest: &mut Guest) -> [Template; 2] {
    let place = TempDir::new().unwrap();
    let template = guest.vm.freeze().unwrap();
    template.write(&place.path().join("snap"), WriteOptions::default()).unwrap();
    // The template is mapped, so it outlives its folder.
    let loaded =
        Template::load(&Kvm::open().unwrap(), &place.path().join("snap"), LoadOptions::default())
            .unwrap();
    [template, loaded]
}

/// Reads the output of a process until it contains `word`.
fn reads(process: &mut Process, word: &str) {
    let (mut seen, deadline) = (String::new(), Instant::now() + SOON);
    while !seen.contains(word) {
        match process.next_event(Some(deadline)).unwrap() {
            Some(ProcessEvent::Stdout(bytes)) => seen += &String::from_utf8_lossy(&bytes),
            other => panic!("{other:?} after {seen:?}"),
        }
    }
}

#[test]
fn detached_process_and_terminal_are_attached_to_by_id_in_a_fork_and_after_a_restore() {
    let mut guest = Guest::boot();
    let counts =
        "i=0; while read line; do i=$((i+1)); echo $i $line; [ $line = end ] && exit $i; done";
    let request = ExecRequest::shell(counts).piped_stdin();
    let counting = guest.agent.start_detached(&request, None).unwrap().id;
    let size = WindowSize { rows: 33, columns: 111 };
    let request = ExecRequest::argv(["sh"]).env("PS1", "$ ").terminal(size);
    let shell = guest.agent.start_detached(&request, None).unwrap().id;
    let attach = |agent: &Agent, id| {
        agent.attach(id, AttachFrom { input: true, ..AttachFrom::default() }).unwrap()
    };
    let mut process = attach(&guest.agent, counting);
    let mut stdin = process.take_stdin().unwrap();
    stdin.write_all(b"parent\n").unwrap();
    reads(&mut process, "1 parent");
    let mut terminal = attach(&guest.agent, shell);
    let mut keys = terminal.take_stdin().unwrap();
    keys.write_all(b"word=kept\r").unwrap();
    reads(&mut terminal, "word=kept");

    for template in copies(&mut guest) {
        let child = Child::of(&template);
        let ids: Vec<_> = child.agent.processes().unwrap().iter().map(|it| it.id).collect();
        assert!(ids.contains(&counting) && ids.contains(&shell), "{ids:?}");
        let mut process = attach(&child.agent, counting);
        let mut stdin = process.take_stdin().unwrap();
        // Earlier output is still there, and the process continues to count.
        reads(&mut process, "1 parent");
        stdin.write_all(b"end\n").unwrap();
        reads(&mut process, "2 end");
        assert_eq!(process.wait().unwrap().shell_code(), 2);
        let mut terminal = attach(&child.agent, shell);
        let mut keys = terminal.take_stdin().unwrap();
        keys.write_all(b"echo \"<$word>\"; stty size; exit 7\r").unwrap();
        reads(&mut terminal, "<kept>");
        reads(&mut terminal, "33 111");
        assert_eq!(terminal.wait().unwrap().shell_code(), 7);
    }
}

#[test]
fn guest_reaches_the_host_by_vsock_in_a_fork_and_after_a_restore() {
    let mut guest = Guest::boot();
    let dial = "import socket; s = socket.socket(socket.AF_VSOCK); s.settimeout(30); \
                s.connect((2, 5000)); s.sendall(b'hello'); print(s.recv(16).decode())";
    for template in copies(&mut guest) {
        let child = Child::of(&template);
        let listener = UnixListener::bind(format!("{}_5000", child.socket().display())).unwrap();
        let answer = std::thread::spawn(move || {
            let (mut stream, mut word) = (listener.accept().unwrap().0, [0; 5]);
            stream.set_read_timeout(Some(SOON)).unwrap();
            stream.read_exact(&mut word).unwrap();
            stream.write_all(b"welcome").unwrap();
            word
        });
        assert_eq!(child.prints(&format!("python3 -c \"{dial}\"")), "welcome");
        assert_eq!(&answer.join().unwrap(), b"hello");
    }
}

/// How long the sleeper sleeps. A freeze and a restore are quicker, so that a part of the sleep is
/// left.
const SLEEP: Duration = Duration::from_secs(8);

#[test]
fn sleep_under_way_takes_no_less_and_not_much_more_than_its_time_in_every_copy() {
    let mut guest = Guest::boot();
    let code = format!(
        "import time; begun = time.monotonic(); open('/tmp/begun', 'w').write(str(begun)); \
         time.sleep({}); open('/tmp/slept', 'w').write(str(time.monotonic() - begun))",
        SLEEP.as_secs()
    );
    guest.agent.start_detached(&ExecRequest::argv(["python3", "-c", &code]), None).unwrap();
    let passed = "until [ -s /tmp/begun ]; do sleep 0.05; done; [ -e /tmp/slept ] && exit 1; \
                  python3 -c \"import time; print(time.monotonic() - float(open('/tmp/begun').read()))\"";
    let asked = Instant::now();
    let passed = Duration::from_secs_f64(guest.prints(passed).parse().unwrap());
    let templates = copies(&mut guest);
    // At least this much of the sleep is left after the freeze: the guest may have run since it was
    // asked.
    let left = SLEEP.saturating_sub(passed + asked.elapsed());
    for template in templates {
        let begun = Instant::now();
        let child = Child::of(&template);
        let slept = child.prints("until [ -s /tmp/slept ]; do sleep 0.05; done; cat /tmp/slept");
        assert!(begun.elapsed() >= left, "{:?} of {left:?}", begun.elapsed());
        let slept = Duration::from_secs_f64(slept.parse().unwrap());
        assert!(slept >= SLEEP && slept < SLEEP + SOON / 2, "{slept:?}");
    }
}

#[test]
fn clock_is_right_in_a_fork_after_a_restore_and_after_a_rollback() {
    let mut guest = Guest::boot();
    for template in copies(&mut guest) {
        // Time passes between the freeze and the fork.
        std::thread::sleep(Duration::from_millis(300));
        check_clock(&Child::of(&template).agent);
    }
    guest.vm.checkpoint().unwrap();
    for _ in 0..2 {
        std::thread::sleep(Duration::from_millis(1500));
        guest.vm.rollback().unwrap();
        check_clock(&guest.refreshed());
    }
}
