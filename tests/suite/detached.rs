//! Detached VMs: `run -d`, `ps`, `exec`, `cp`, `logs`, `kill`, `rm`.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::thread;
use std::time::Duration;

use pvmm_tests::cli::User;

/// Waits up to five seconds for something that happens in the background. Returns whether it has
/// happened.
fn soon(mut happened: impl FnMut() -> bool) -> bool {
    (0..50).any(|_| {
        happened() || {
            thread::sleep(Duration::from_millis(100));
            false
        }
    })
}

#[test]
fn detached_vm_is_listed_executes_and_is_killed() {
    let user = User::new();
    let id = user.detached(&["--name", "box"]);
    assert_eq!(id.len(), 12);
    let said = user.pvmm(["exec", "box", "--", "echo", "hello"]);
    assert_eq!((said.code, said.text()), (Some(0), "hello"), "{said:?}");
    let listed = user.pvmm(["ps", "--json"]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(listed[0]["id"], id.as_str());
    assert_eq!(user.pvmm(["kill", "box"]).code, Some(0));
    assert_eq!(user.pvmm(["exec", &id, "--", "true"]).code, Some(2));
}

#[test]
fn detached_vm_with_a_taken_name_is_refused() {
    let user = User::new();
    user.detached(&["--name", "one"]);
    let said = user.pvmm(["run", "-d", "--name", "one"]);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert!(said.stderr.starts_with("error: "), "{}", said.stderr);
    assert_eq!(user.pvmm(["kill", "one"]).code, Some(0));
}

#[test]
fn detached_vm_whose_process_died_is_shown_dead_and_removed() {
    let user = User::new();
    let id = user.detached(&[]);
    let record = fs::read(user.runtime().join(&id).join("vm.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let pid = record["pid"].to_string();
    assert!(std::process::Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    let dead = || user.pvmm(["ps", "--json"]).text().contains("dead");
    assert!(soon(dead));
    assert_eq!(user.pvmm(["rm", &id]).code, Some(0));
}

#[test]
fn g12_command_for_a_vm_that_ended_is_refused() {
    let user = User::new();
    let id = user.detached(&["--", "true"]);
    assert!(soon(|| user.pvmm(["ps", "--json"]).text().contains("exited")));
    let said = user.pvmm(["exec", &id, "--", "true"]);
    assert_eq!(said.code, Some(2), "{said:?}");
    assert_eq!(user.pvmm(["rm", &id]).code, Some(0));
}

#[test]
fn logs_of_a_detached_command_show_what_it_printed() {
    let user = User::new();
    let id = user.detached(&["--", "sh", "-c", "echo to-out; echo to-err >&2; sleep 600"]);
    let logs = || String::from_utf8_lossy(&user.pvmm(["logs", &id]).stdout).into_owned();
    assert!(soon(|| logs().contains("to-out")));
    assert_eq!(user.pvmm(["kill", &id]).code, Some(0));
}

#[test]
fn cp_of_a_folder_in_and_out_gives_the_same_files() {
    let user = User::new();
    let id = user.detached(&[]);
    let here = tempfile::tempdir().unwrap();
    let (sent, back) = (here.path().join("sent"), here.path().join("back"));
    fs::create_dir_all(sent.join("deep/er")).unwrap();
    fs::write(sent.join("deep/er/big"), vec![7; 3 << 20]).unwrap();
    fs::write(sent.join("run.sh"), "#!/bin/sh\necho ran\n").unwrap();
    std::os::unix::fs::symlink("run.sh", sent.join("link")).unwrap();
    let holes = fs::File::create(sent.join("holes")).unwrap();
    holes.write_all_at(b"end", 1 << 30).unwrap();
    let path = |p: &std::path::Path| p.to_str().unwrap().to_owned();
    assert_eq!(user.pvmm(["cp", &path(&sent), &format!("{id}:/workspace/got")]).code, Some(0));
    assert_eq!(user.pvmm(["exec", &id, "--", "sh", "/workspace/got/link"]).text(), "ran");
    assert_eq!(user.pvmm(["cp", &format!("{id}:/workspace/got"), &path(&back)]).code, Some(0));
    assert_eq!(fs::read(back.join("deep/er/big")).unwrap(), vec![7; 3 << 20]);
    assert_eq!(fs::read_link(back.join("link")).unwrap().to_str(), Some("run.sh"));
    let used = user.pvmm(["exec", &id, "--", "du", "-k", "/workspace/got/holes"]);
    let used: u64 = used.text().split_whitespace().next().unwrap().parse().unwrap();
    assert!(used < 1024, "{used} KiB of a hole");
    let holes = fs::metadata(back.join("holes")).unwrap();
    assert_eq!(holes.len(), (1 << 30) + 3);
    assert!(holes.blocks() * 512 < 1 << 20, "{} blocks", holes.blocks());
    assert_eq!(user.pvmm(["kill", &id]).code, Some(0));
}

#[test]
fn hundred_execs_at_once_all_return_their_own_output() {
    let user = User::new();
    let id = user.detached(&["--memory", "1G"]);
    let children: Vec<_> =
        (0..100).map(|n| (n, user.spawn(["exec", &id, "--", "echo", &n.to_string()]))).collect();
    for (number, child) in children {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.stdout, format!("{number}\n").into_bytes(), "{output:?}");
        assert!(output.status.success());
    }
    assert_eq!(user.pvmm(["kill", &id]).code, Some(0));
}
