//! `pvmm run`: it works like `docker run --rm` and leaves nothing behind.

use std::time::Duration;

use pvmm_tests::cli::User;

#[test]
fn run_of_python_prints_and_exits_zero() {
    let user = User::new();
    let said = user.pvmm(["run", "--", "python3", "-c", "print(6*7)"]);
    assert_eq!((said.code, said.text()), (Some(0), "42"), "{said:?}");
}

#[test]
fn run_passes_the_exit_code_through() {
    let user = User::new();
    let said = user.pvmm(["run", "--", "python3", "-c", "import sys; sys.exit(7)"]);
    assert_eq!(said.code, Some(7), "{said:?}");
}

#[test]
fn run_of_a_missing_command_is_127_and_of_a_folder_126() {
    let user = User::new();
    assert_eq!(user.pvmm(["run", "--", "no-such-command"]).code, Some(127));
    assert_eq!(user.pvmm(["run", "--", "/etc"]).code, Some(126));
}

#[test]
fn run_with_a_timeout_ends_in_time_with_124() {
    let user = User::new();
    let said = user.pvmm(["run", "--timeout", "2s", "--", "sleep", "60"]);
    assert_eq!(said.code, Some(124), "{said:?}");
    assert!(said.took < Duration::from_secs(4), "{:?}", said.took);
}

#[test]
fn run_keeps_streams_apart_and_takes_env_workdir_and_user() {
    let user = User::new();
    let line = "echo $GREETING $PWD $(id -u); echo to-err >&2";
    let args = ["run", "-e", "GREETING=hi", "-w", "/tmp", "-u", "1000", "--", "sh", "-c", line];
    let said = user.pvmm(args);
    assert_eq!(said.text(), "hi /tmp 1000", "{said:?}");
    assert!(said.stderr.contains("to-err"));
}

#[test]
fn run_with_200_mb_on_stdout_delivers_all_of_it_in_order() {
    let user = User::new();
    let code = "import sys\nblock = bytes(range(256)) * 4096\nfor i in range(200): sys.stdout.buffer.write(block)";
    let said = user.pvmm(["run", "--", "python3", "-c", code]);
    assert_eq!(said.stdout.len(), 200 << 20, "{}", said.stderr);
    assert!(
        said.stdout
            .chunks(256)
            .all(|chunk| chunk.iter().zip(0..=255).all(|(byte, at)| *byte == at))
    );
}

#[test]
fn run_with_50_mb_on_stdin_hashes_it_right() {
    let user = User::new();
    let input: Vec<u8> =
        (0..50u32 << 20).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &input).unwrap();
    let expected = pvmm_tests::guest::digest(file.path());
    let said = user.pvmm_with_input(["run", "-i", "--", "sh", "-c", "cat | sha256sum"], &input);
    assert_eq!(said.text().split(' ').next(), Some(expected.as_str()), "{}", said.stderr);
}

#[test]
fn run_without_i_has_an_empty_stdin() {
    let user = User::new();
    let said = user.pvmm_with_input(["run", "--", "wc", "-c"], b"ignored");
    assert_eq!(said.text(), "0");
}

#[test]
fn run_that_is_interrupted_passes_the_signal_on_and_leaves_nothing() {
    let user = User::new();
    let line = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.1; done";
    let mut child = user.spawn(["run", "--", "sh", "-c", line]);
    wait_for(&mut child, b"ready\n");
    signal(&child, libc::SIGINT);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(9), &b"caught\n"[..]));
}

#[test]
fn run_whose_launcher_is_killed_leaves_nothing() {
    let user = User::new();
    let mut child = user.spawn(["run", "--", "sh", "-c", "echo ready; sleep 600"]);
    wait_for(&mut child, b"ready\n");
    signal(&child, libc::SIGKILL);
    child.wait().unwrap();
}

#[test]
fn run_never_writes_the_root_image() {
    let user = User::new();
    let image = pvmm_tests::guest::base().rootfs;
    let before = pvmm_tests::guest::digest(&image);
    user.run("rm -rf /usr/lib/python3; echo x > /etc/passwd; dd if=/dev/zero of=/big bs=1M count=64 2>/dev/null; sync");
    assert_eq!(pvmm_tests::guest::digest(&image), before);
}

/// Reads standard output, which must begin with `line`.
fn wait_for(child: &mut std::process::Child, line: &[u8]) {
    use std::io::Read;
    let mut seen = vec![0; line.len()];
    child.stdout.as_mut().unwrap().read_exact(&mut seen).unwrap();
    assert_eq!(seen, line);
}

fn signal(child: &std::process::Child, signal: i32) {
    let pid = child.id().to_string();
    let sent = std::process::Command::new("kill").args([&format!("-{signal}"), &pid]).status();
    assert!(sent.unwrap().success());
}
