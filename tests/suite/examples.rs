//! The examples of the library, run as a reader runs them: their output, and that they leave
//! nothing behind.

use std::process::Command;

use pvmm_tests::cli::{self, User};
use tempfile::TempDir;

/// Runs an example, which must succeed and leave its directory for temporary files empty. Returns
/// its output.
fn prints(name: &str) -> String {
    // Dropping the user checks processes, mounts and control groups.
    let _user = User::new();
    let temporary = TempDir::new().unwrap();
    let program = cli::built("examples").join(name);
    let output = Command::new(program).env("TMPDIR", temporary.path()).output().unwrap();
    assert!(output.status.success(), "{name}: {output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(temporary.path().read_dir().unwrap().count(), 0);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn example_boot_prints_a_name_and_an_outcome() {
    let text = prints("boot");
    let (uname, outcome) = text.split_once('\n').unwrap();
    assert!(uname.starts_with("Linux ") && uname.ends_with(" x86_64"), "{uname}");
    assert_eq!(outcome, "outcome: Poweroff\n");
}

#[test]
fn example_exec_prints_streams_and_statuses() {
    assert_eq!(
        prints("exec"),
        r#"sorted: "apple\npear\n"
stdout: "for you\n"
stderr: "for the log\n"
status: Exited { code: 7 }
timed out: true, as a shell 124
not there: as a shell 127
hello -> HELLO
goodbye -> GOODBYE
ended: Exited { code: 0 }
"#
    );
}

#[test]
fn example_fork_prints_that_forks_differ() {
    assert_eq!(
        prints("fork"),
        "left reads: written before the fork
right reads: written before the fork
left has now: left
right has now: right
parent has still: written before the fork
different boot ids: 3
"
    );
}

#[test]
fn example_rollback_prints_that_the_guest_is_whole() {
    assert_eq!(
        prints("rollback"),
        "before: 42
without its files: broken, CouldNotStart { stage: Exec, errno: 2 }
taken back: 42
after a panic: Reboot
taken back: 42
"
    );
}

#[test]
fn example_snapshot_prints_what_the_guest_remembers() {
    assert_eq!(prints("snapshot"), "wrote 256 MiB, 1 vCPU\nanswer + 1 = 42\n");
}

#[test]
fn example_service_prints_an_answer_to_each_request() {
    assert_eq!(
        prints("service"),
        "0: 42
1: agent: the agent refused: /no/such/file: No such file or directory (os error 2) (open)
2: exit code 3
3: the guest was lost
4: a request reads or runs
5: 4950
left in the directory: 0
"
    );
}
