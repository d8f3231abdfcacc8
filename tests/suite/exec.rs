//! Commands in a guest, through the library.

use std::thread;
use std::time::{Duration, Instant};

use pvmm::exec::ExecRequest;
use pvmm_tests::guest::Guest;

#[test]
fn hundred_commands_at_once_each_return_their_own_output() {
    let guest = Guest::boot();
    thread::scope(|scope| {
        for number in 0..100 {
            let guest = &guest;
            scope.spawn(move || {
                let line = format!("echo out {number}; echo err {number} >&2; exit {number}");
                let output = guest.shell(&line);
                assert_eq!(output.stdout.bytes, format!("out {number}\n").into_bytes());
                assert_eq!(output.stderr.bytes, format!("err {number}\n").into_bytes());
                assert_eq!(output.status.shell_code(), number);
            });
        }
    });
}

#[test]
fn g8_command_whose_guest_is_killed_ends_with_an_error_at_once() {
    let guest = Guest::boot();
    let agent = guest.agent.clone();
    let waiting = thread::spawn(move || {
        let start = Instant::now();
        (agent.exec(&ExecRequest::argv(["sleep", "600"])), start.elapsed())
    });
    thread::sleep(Duration::from_secs(2));
    drop(guest.vm);
    let (result, took) = waiting.join().unwrap();
    assert!(result.is_err(), "{result:?}");
    assert!(took < Duration::from_secs(15), "{took:?}");
}

#[test]
fn g9_fork_bomb_with_a_timeout_is_killed_and_the_guest_goes_on() {
    let guest = Guest::boot();
    let bomb = "import os, time\nfor i in range(60):\n  if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\ntime.sleep(600)";
    let request = ExecRequest::argv(["python3", "-c", bomb]).timeout(Duration::from_secs(5));
    let output = guest.agent.exec(&request).unwrap();
    assert!(output.status.timed_out, "{output:?}");
    assert_eq!(guest.prints("pgrep -c python3 || true"), "0");
}

#[test]
fn python_ssl_and_pip_work_in_base() {
    let guest = Guest::boot();
    let code = "import json, ssl, sqlite3, hashlib; print(json.dumps(len(ssl.create_default_context().get_ca_certs()) > 50))";
    assert_eq!(guest.prints(&format!("python3 -c '{code}'")), "true");
    assert!(guest.prints("python3 -m pip --version").starts_with("pip "));
}
