//! The tree of a VM's checkpoints through the command line: branches, what differs, and back.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use pvmm_tests::cli::User;
use serde_json::Value;
use tempfile::TempDir;

fn shell(user: &User, line: &str) -> String {
    user.ok(&["exec", "web", "--", "sh", "-c", line])
}

/// A process whose variable is only in memory: what it reads becomes the word, and it tells the
/// word when it reads `say`.
const KEEPER: &str = "exec 3<>/run/ask; word=one; while read -r line <&3; do \
    case $line in say) echo $word > /run/answer;; *) word=$line;; esac; done";

fn word(user: &User) -> String {
    shell(user, "echo say > /run/ask; cat /run/answer")
}

fn log(user: &User) -> Vec<(String, Option<String>, bool)> {
    let rows: Value = serde_json::from_str(&user.ok(&["log", "web", "--json"])).unwrap();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let row = |row: &Value| {
        (text(&row["name"]).unwrap(), text(&row["parent"]), row["current"].as_bool().unwrap())
    };
    rows.as_array().unwrap().iter().map(row).collect()
}

fn diff(user: &User, args: &[&str]) -> Vec<String> {
    let words = [&["diff", "web", "--path", "/srv"], args].concat();
    user.ok(&words).lines().map(str::to_owned).collect()
}

#[test]
fn what_an_agent_destroys_on_three_branches_is_shown_and_undone() {
    let user = User::new();
    user.detached(&["--name", "web"]);
    shell(
        &user,
        "mkdir /srv/app; echo 'mode = safe' > /srv/app/config; mkfifo /run/ask /run/answer; \
         head -c 100000 /dev/urandom > /srv/app/data.db; sha256sum /srv/app/* > /root/sums",
    );
    user.ok(&["exec", "-d", "web", "--", "sh", "-c", KEEPER]);
    assert_eq!(word(&user), "one");
    assert_eq!(user.ok(&["checkpoint", "web", "--name", "base"]), "base");

    shell(&user, "echo two > /run/ask; rm -rf /srv/app /usr/bin");
    user.ok(&["checkpoint", "web", "--name", "wiped"]);
    user.ok(&["checkout", "web", "base"]);
    assert_eq!(word(&user), "one");
    shell(&user, "sha256sum -c /root/sums; echo three > /run/ask; rm /srv/app/data.db");
    user.ok(&["checkpoint", "web", "--name", "no-db"]);
    user.ok(&["checkout", "web", "base"]);
    // Of the same size, and with the time that it had.
    let rewrite = "cd /srv/app; touch -r config /tmp/then; echo 'mode = harm' > config; \
        touch -r /tmp/then config; ln -s config link; chmod 600 data.db";
    shell(&user, rewrite);
    assert_eq!(user.ok(&["checkpoint", "web"]), "1");

    let base = || Some("base".to_owned());
    let tree = [
        ("base".to_owned(), None, false),
        ("wiped".to_owned(), base(), false),
        ("no-db".to_owned(), base(), false),
        ("1".to_owned(), base(), true),
    ];
    assert_eq!(log(&user), tree);
    assert!(user.ok(&["log", "web"]).starts_with("base"));

    assert_eq!(
        diff(&user, &["base", "no-db"]),
        ["D  /srv/app/data.db  100000 bytes", "0 added, 0 changed, 1 removed"]
    );
    assert_eq!(
        diff(&user, &["base", "wiped"]),
        [
            "D  /srv/app/",
            "D  /srv/app/config  12 bytes",
            "D  /srv/app/data.db  100000 bytes",
            "0 added, 0 changed, 3 removed"
        ]
    );
    let changed = diff(&user, &["no-db", "--patch"]).join("\n");
    let lines = "M  /srv/app/config  12 bytes\n--- a/srv/app/config\n+++ b/srv/app/config\n\
        @@ -1 +1 @@\n-mode = safe\n+mode = harm\nA  /srv/app/data.db  100000 bytes\n\
        A  /srv/app/link\n2 added, 1 changed, 0 removed";
    assert_eq!(changed, lines);
    assert!(diff(&user, &["base"]).contains(&"M  /srv/app/data.db  100000 bytes  (mode)".into()));
    // A whole guest, one side of which has no program left.
    let all = user.ok(&["diff", "web", "base", "wiped", "--json"]);
    let all: Value = serde_json::from_str(&all).unwrap();
    let has = |path: &str| all["changes"].as_array().unwrap().iter().any(|it| it["path"] == path);
    assert!(has("/usr/bin/env") && has("/srv/app/config") && !has("/etc/machine-id"), "{all}");
    assert_eq!((word(&user), user.ok(&["ps", "-q"]).lines().count()), ("one".to_owned(), 1));

    user.ok(&["fork", "web", "--at", "no-db", "--name", "probe"]);
    let there = "test -e /srv/app/data.db || cat /srv/app/config";
    assert_eq!(user.ok(&["exec", "probe", "--", "sh", "-c", there]), "mode = safe");
    user.ok(&["kill", "--signal", "KILL", "probe"]);

    user.ok(&["checkout", "web", "wiped"]);
    assert_eq!(user.pvmm(["exec", "web", "--", "sh"]).code, Some(127));
    user.ok(&["rollback", "web"]);
    assert_eq!(user.pvmm(["exec", "web", "--", "sh"]).code, Some(127));
    user.ok(&["checkpoint", "web", "--delete", "base"]);
    assert_eq!(user.pvmm(["checkout", "web", "base"]).code, Some(2));
    user.ok(&["checkout", "web", "no-db"]);
    assert_eq!((word(&user), shell(&user, "ls /srv/app")), ("three".into(), "config".into()));
    assert_eq!(log(&user)[1], ("no-db".to_owned(), None, true));
    compare_with_a_restore(&user);
}

/// Prints how long a checkout takes beside a snapshot, the end of the VM and a restore.
fn compare_with_a_restore(user: &User) {
    let checkout = user.pvmm(["checkout", "web", "1"]).took;
    let place = TempDir::new().unwrap();
    let folder = place.path().join("web");
    let folder = folder.to_str().unwrap();
    let begun = Instant::now();
    user.ok(&["snapshot", "web", folder]);
    let saved = begun.elapsed();
    user.ok(&["kill", "--signal", "KILL", "web"]);
    user.ok(&["restore", folder, "--name", "web"]);
    let restored = begun.elapsed() - saved;
    println!("checkout {checkout:?}; snapshot {saved:?}, kill and restore {restored:?}");
    user.ok(&["kill", "--signal", "KILL", "web"]);
}

/// A diff that is interrupted leaves no VM, nor does one that is killed once the next has run.
#[test]
fn diff_that_is_cut_short_leaves_nothing() {
    let user = User::new();
    user.detached(&["--name", "web"]);
    user.ok(&["checkpoint", "web", "--name", "then"]);
    let cut = |signal: &str, after: u64| {
        let mut child = user.spawn(["diff", "web", "then"]);
        thread::sleep(Duration::from_millis(after));
        let _ = Command::new("kill").args([signal, &child.id().to_string()]).status();
        child.wait().unwrap();
    };
    [700, 1500, 3000].iter().for_each(|after| cut("-KILL", *after));
    user.ok(&["diff", "web", "then", "--path", "/srv"]);
    [200, 700, 1500, 3000].iter().for_each(|after| cut("-INT", *after));
    let deadline = Instant::now() + Duration::from_secs(60);
    while user.ok(&["ps", "-q"]).lines().count() > 1 {
        assert!(Instant::now() < deadline, "{}", user.ok(&["ps"]));
        thread::sleep(Duration::from_millis(50));
    }
    user.ok(&["kill", "--signal", "KILL", "web"]);
}
