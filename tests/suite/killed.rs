//! A process that is killed in mid-stream: every other side gets a specific error soon, and nothing
//! hangs.

use std::fs;
use std::io::{self, Read, Write};
use std::process::Child;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pvmm::agent::{Agent, AgentError, FileWriteOptions};
use pvmm::exec::{ExecError, ExecRequest, ProcessEvent};
use pvmm_tests::cli::User;
use pvmm_tests::guest::Guest;

/// Far less than the time after which a silent agent counts as lost.
const SOON: Duration = Duration::from_secs(30);

/// Starts a client that reads an endless stream, and waits until the stream flows.
fn streaming(user: &User, vm: &str) -> Child {
    let mut client = user.spawn(["exec", vm, "--", "yes", "mid-stream"]);
    let mut some = [0; 4096];
    client.stdout.as_mut().unwrap().read_exact(&mut some).unwrap();
    client
}

/// Starts to write an endless file into the guest. The thread returns the error that ends the
/// writing.
fn writing(user: &User, vm: &str) -> JoinHandle<io::Error> {
    let socket = user.runtime().join(vm).join("run/vsock.sock");
    let agent = Agent::connect(&socket, Instant::now() + SOON).unwrap();
    let options = FileWriteOptions { in_place: true, ..FileWriteOptions::default() };
    let mut writer = agent.open_write("/dev/null", &options).unwrap();
    let block = [7; 1 << 16];
    writer.write_all(&block).unwrap();
    std::thread::spawn(move || {
        loop {
            if let Err(why) = writer.write_all(&block) {
                return why;
            }
        }
    })
}

#[test]
fn client_and_vmm_killed_in_mid_stream_leave_nobody_waiting() {
    let user = User::new();
    let vm = user.detached(&[]);

    let mut client = streaming(&user, &vm);
    client.kill().unwrap();
    client.wait().unwrap();
    let begun = Instant::now();
    // The guest ends the command of the dead client, and serves the next client.
    let gone = "for i in $(seq 50); do pgrep -x yes >/dev/null || exit 0; sleep 0.2; done; exit 1";
    assert_eq!(user.pvmm(["exec", &vm, "--", "sh", "-c", gone]).code, Some(0));
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());

    let client = streaming(&user, &vm);
    let file = writing(&user, &vm);
    let listed = user.pvmm(["ps", "--json"]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let pid = listed[0]["pid"].as_i64().unwrap() as i32;
    let begun = Instant::now();
    // SAFETY: no memory is passed; the process runs a VM of this test, which was just listed with
    // this pid.
    #[allow(unsafe_code)]
    unsafe {
        libc::kill(pid, libc::SIGKILL);
    }
    let output = client.wait_with_output().unwrap();
    let lost = file.join().unwrap().downcast::<AgentError>();
    assert!(matches!(lost, Ok(AgentError::Lost(_))), "{lost:?}");
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    assert_eq!(output.status.code(), Some(125));
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.starts_with("error: ") && words.contains("agent"), "{words}");
    let said = user.pvmm(["exec", &vm, "--", "true"]);
    assert_eq!(said.code, Some(2), "{said:?}");
    user.pvmm(["rm", &vm]);
    assert!(fs::read_dir(user.runtime()).map_or(0, Iterator::count) <= 1);
}

#[test]
fn agent_cannot_be_killed_from_inside_and_its_end_is_told_at_once() {
    let guest = Guest::boot();
    // The agent is the guest's first process: the kernel protects it even from root's SIGKILL.
    assert_eq!(guest.prints("kill -9 1; echo alive"), "alive");
    let mut process = guest.agent.start(&ExecRequest::argv(["yes"])).unwrap();
    let patience = Some(Instant::now() + SOON);
    assert!(matches!(process.next_event(patience), Ok(Some(ProcessEvent::Stdout(_)))));
    // The agent ends only with the whole kernel.
    let agent = guest.agent.clone();
    let crash = std::thread::spawn(move || {
        agent.exec(&ExecRequest::shell(
            "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger",
        ))
    });
    let begun = Instant::now();
    let lost = loop {
        match process.next_event(Some(begun + 2 * SOON)) {
            Ok(Some(ProcessEvent::Stdout(_))) => {}
            other => break other,
        }
    };
    assert!(matches!(lost, Err(ExecError::Agent(AgentError::Lost(_)))), "{lost:?}");
    assert!(matches!(crash.join().unwrap(), Err(ExecError::Agent(AgentError::Lost(_)))));
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
}

#[test]
fn l4_fork_that_finds_no_memory_fails_and_its_parent_goes_on() {
    let user = User::new();
    let vm = user.detached(&["--memory", "512M"]);
    let fill = "yes | head -c 160M > /dev/shm/filled; md5sum < /dev/shm/filled";
    let sum = user.pvmm(["exec", &vm, "--", "sh", "-c", fill]);
    let limit = std::path::Path::new("/sys/fs/cgroup/pvmm").join(&vm).join("memory.max");
    fs::write(&limit, "280M").unwrap();
    let said = user.pvmm(["fork", &vm]);
    assert_eq!(said.code, Some(125), "{said:?}");
    assert!(said.stderr.contains("memory enough"), "{said:?}");
    let again = ["exec", &vm, "--", "sh", "-c", "md5sum < /dev/shm/filled"];
    assert_eq!(user.pvmm(again).text(), sum.text());
    fs::write(&limit, "max").unwrap();
    let fork = user.pvmm(["fork", &vm]);
    assert_eq!(fork.code, Some(0), "{fork:?}");
    let again = ["exec", fork.text(), "--", "sh", "-c", "md5sum < /dev/shm/filled"];
    assert_eq!(user.pvmm(again).text(), sum.text());
    for vm in [&vm, fork.text()] {
        assert_eq!(user.pvmm(["kill", "--signal", "KILL", vm]).code, Some(0));
    }
}
