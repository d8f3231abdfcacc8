//! Commands that outlive their client, through the command line.

use std::io::Read;

use pvmm_tests::cli::User;

#[test]
fn detached_command_is_listed_followed_and_killed() {
    let user = User::new();
    let vm = user.detached(&[]);
    let line = "echo begun; sleep 1; echo more; sleep 600";
    let said = user.pvmm(["exec", "-d", &vm, "--", "sh", "-c", line]);
    assert_eq!(said.code, Some(0), "{said:?}");
    let name = format!("{vm}:{}", said.text());
    let listed = user.pvmm(["ps", "--json", &vm]);
    let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(listed[0]["state"], "running");
    assert_eq!(listed[0]["command"], format!("sh -c {line}"));

    // One client attaches to a command that ends; another follows a command until it is killed.
    let mut follower = user.spawn(["attach", "--from", "6", &name]);
    let short = user.pvmm(["exec", "-d", &vm, "--", "sh", "-c", "echo out; echo err >&2; exit 5"]);
    let short = format!("{vm}:{}", short.text());
    let said = user.pvmm(["attach", &short]);
    assert_eq!((said.code, said.text(), said.stderr.as_str()), (Some(5), "out", "err\n"));
    assert_eq!(user.pvmm(["attach", &short]).text(), "out", "a second time as well");
    let mut followed = [0; 5];
    follower.stdout.as_mut().unwrap().read_exact(&mut followed).unwrap();
    assert_eq!(&followed, b"more\n");
    assert_eq!(user.pvmm(["kill", &name]).code, Some(0));
    let end = follower.wait_with_output().unwrap();
    assert_eq!((end.status.code(), end.stdout.as_slice()), (Some(143), &b""[..]));

    let missing = user.pvmm(["attach", &format!("{vm}:99999")]);
    assert_eq!(missing.code, Some(2), "{missing:?}");
    assert!(missing.stderr.contains("pvmm ps"), "{missing:?}");
    assert_eq!(user.pvmm(["kill", &vm]).code, Some(0));
}
