//! The network of a VM that needs nothing prepared: what its policy names is reached, everything
//! else is refused at once and listed.

use std::time::{Duration, Instant};

use pvmm_tests::cli::{Said, User};
use pvmm_tests::guest;
use pvmm_tests::internet::{Internet, OTHER, RESOLVER, SERVER};
use pvmm_tests::network;
use serde_json::Value;

use crate::tools::TEMPLATE;

/// The time within which a refusal reaches the guest.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Fetches a page in the guest and prints it, or the error and how long it took.
const FETCH: &str = r#"
import sys, time, urllib.request
begun = time.time()
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())
except Exception as error:
    print(type(getattr(error, "reason", error)).__name__, round(time.time() - begun, 2))
"#;

fn internet() -> Internet {
    Internet::new(&[
        ("example.test", SERVER),
        ("other.test", OTHER),
        ("metadata.test", "169.254.169.254"),
        ("loop.test", "127.0.0.1"),
    ])
}

fn ok(said: Said) -> Said {
    assert_eq!(said.code, Some(0), "{said:?}");
    said
}

fn fetch(user: &User, vm: &str, url: &str) -> String {
    ok(user.pvmm(["exec", vm, "--", "python3", "-c", FETCH, url])).text().to_owned()
}

/// Checks that a page is refused, and within the time.
fn refused(user: &User, vm: &str, url: &str) {
    let said = fetch(user, vm, url);
    let took = said.rsplit(' ').next().and_then(|took| took.parse::<f64>().ok());
    assert!(took.is_some_and(|took| took < AT_ONCE.as_secs_f64()), "{url}: {said}");
}

fn status(user: &User, vm: &str) -> Value {
    serde_json::from_slice(&ok(user.pvmm(["net", vm, "--json"])).stdout).unwrap()
}

/// Runs a guest of `user`, made by `pvmm run` with `words`, that may reach one name.
fn reaches_one_name(internet: &Internet, user: &User, words: &[&str]) {
    let allowed = ["--allow-host", "example.test:80", "--resolver", RESOLVER];
    let vm = user.detached(&[words, &allowed].concat());
    assert_eq!(fetch(user, &vm, "http://example.test/"), format!("{SERVER} example.test"));
    refused(user, &vm, "http://other.test/");
    refused(user, &vm, &format!("http://{OTHER}/"));
    refused(user, &vm, "http://169.254.169.254/latest/meta-data/");
    refused(user, &vm, "http://127.0.0.1:1/");
    let denied = status(user, &vm)["denied"].to_string();
    assert!(denied.contains("other.test") && denied.contains("169.254.169.254"), "{denied}");
    let seen = internet.seen();
    assert_eq!(seen, ["dns example.test", &format!("http {SERVER} example.test")]);
    ok(user.pvmm(["kill", &vm]));
}

#[test]
fn guest_reaches_the_names_of_its_policy_and_no_other() {
    network::isolated(|| reaches_one_name(&internet(), &User::new(), &["--cold"]));
}

#[test]
fn guest_forked_from_a_template_with_a_card_reaches_the_names_of_its_policy_and_no_other() {
    network::isolated(|| {
        let (internet, user) = (internet(), User::new());
        ok(user.pvmm(["template", "bake", "-q", "--net"]));
        // Only a warm template has an interpreter that waits.
        let forked = ["run", "--net", "--", "sh", "-c", "cat /proc/[0-9]*/comm"];
        assert!(ok(user.pvmm(forked)).text().contains("python3"));
        reaches_one_name(&internet, &user, &[]);
    });
}

#[test]
fn guest_of_an_ordinary_user_reaches_the_names_of_its_policy_and_no_other() {
    network::isolated(|| {
        let (internet, user) = (internet(), User::ordinary());
        let kernel = user.brings(&guest::default_kernel().vmlinux);
        let rootfs = user.brings(&guest::base().rootfs);
        reaches_one_name(&internet, &user, &["--kernel", &kernel, "--rootfs", &rootfs]);
    });
}

#[test]
fn curl_in_a_run_of_one_line_prints_the_page_or_says_at_once_why_not() {
    network::isolated(|| {
        let (_internet, user) = (internet(), User::new());
        let run = ["run", "--net", "--allow-host", "example.test", "--resolver", RESOLVER];
        let curl = ["--template", TEMPLATE, "--", "curl", "-sS", "--max-time"];
        let get = |seconds, url| user.pvmm([&run[..], &curl, &[seconds, url]].concat());
        assert_eq!(ok(get("20", "http://example.test/")).text(), format!("{SERVER} example.test"));
        let said = get("1", "http://other.test/");
        let could_not_resolve = Some(6);
        assert_eq!(said.code, could_not_resolve, "{said:?}");
        assert!(said.stderr.contains("Could not resolve host: other.test"), "{said:?}");
    });
}

#[test]
fn guest_is_not_led_into_closed_ranges_by_a_name_nor_past_the_policy_by_a_header() {
    network::isolated(|| {
        let (internet, user) = (internet(), User::new());
        let names = ["metadata.test", "loop.test", "example.test"];
        let mut args = vec!["--resolver", RESOLVER];
        names.iter().for_each(|name| args.extend(["--allow-host", name]));
        let vm = user.detached(&args);
        refused(&user, &vm, "http://metadata.test/");
        refused(&user, &vm, "http://loop.test/");
        // An allowed name in the header, at an address that is not the name's.
        let forged = format!(
            "import urllib.request as u; r = u.Request('http://{OTHER}/', headers={{'Host': 'example.test'}})\n\
             try: print(u.urlopen(r, timeout=20).read().decode())\n\
             except Exception as e: print('refused')"
        );
        let said = ok(user.pvmm(["exec", &vm, "--", "python3", "-c", &forged]));
        assert!(said.text() == "refused" || said.text().starts_with(SERVER), "{said:?}");
        let seen = internet.seen().join("\n");
        assert!(!seen.contains(OTHER) && !seen.contains("http 169.254"), "{seen}");
        ok(user.pvmm(["kill", &vm]));
    });
}

/// Sends a datagram in the guest and prints the answer, or the error and whether it came at once.
const DATAGRAM: &str = r#"
import errno, socket, sys, time
begun = time.time()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(20)
udp.connect((sys.argv[1], 7))
udp.send(b"hello")
try:
    print(udp.recv(100).decode())
except OSError as error:
    print(errno.errorcode.get(error.errno, error), time.time() - begun < 1)
"#;

#[test]
fn datagram_reaches_the_address_that_a_rule_names_for_udp_and_no_other() {
    network::isolated(|| {
        let (internet, user) = (internet(), User::new());
        let rule = format!("{SERVER}/32:7/udp");
        let vm = user.detached(&["--allow", &rule, "--resolver", RESOLVER]);
        let send = |to| {
            let said = ok(user.pvmm(["exec", &vm, "--", "python3", "-c", DATAGRAM, to]));
            said.text().trim_end().to_owned()
        };
        assert_eq!(send(SERVER), "hello");
        assert_eq!(send(OTHER), "EHOSTUNREACH True");
        assert_eq!(send("169.254.169.254"), "EHOSTUNREACH True");
        let shown = ok(user.pvmm(["net", &vm])).text().to_owned();
        assert!(
            [&rule, OTHER, "7/udp", "no-rule"].iter().all(|word| shown.contains(word)),
            "{shown}"
        );
        assert_eq!(status(&user, &vm)["rules"][0]["bytes_in"], 5);
        assert_eq!(internet.seen(), [format!("udp {SERVER} hello")]);
        ok(user.pvmm(["net", &vm, "--deny", &format!("{SERVER}:7")]));
        assert_eq!(send(SERVER), "EHOSTUNREACH True");
        ok(user.pvmm(["kill", &vm]));
    });
}

#[test]
fn policy_of_a_running_vm_is_asked_and_changed_at_once() {
    network::isolated(|| {
        let (_internet, user) = (internet(), User::new());
        let vm = user.detached(&["--net", "--resolver", RESOLVER]);
        refused(&user, &vm, "http://example.test/");
        assert_eq!(user.pvmm(["net", "check", &vm, "example.test:80"]).code, Some(1));
        ok(user.pvmm(["net", &vm, "--allow-host", "example.test"]));
        assert!(ok(user.pvmm(["net", "check", &vm, "example.test:80"])).text().contains("allowed"));
        assert_eq!(fetch(&user, &vm, "http://example.test/"), format!("{SERVER} example.test"));
        assert_eq!(status(&user, &vm)["rules"][0]["connections"], 1);
        ok(user.pvmm(["net", &vm, "--deny", "example.test"]));
        refused(&user, &vm, "http://example.test/");
        let wrong = user.pvmm(["net", &vm, "--allow", "300.0.0.0/8"]);
        assert_eq!(
            (wrong.code, wrong.stderr.contains("300.0.0.0/8")),
            (Some(2), true),
            "{wrong:?}"
        );
        ok(user.pvmm(["kill", &vm]));
    });
}

#[test]
fn forks_and_restores_have_networks_of_their_own_with_the_policy_of_their_parent() {
    network::isolated(|| {
        let (_internet, user) = (internet(), User::new());
        let place = tempfile::tempdir().unwrap();
        let snapshot = place.path().join("snap").to_str().unwrap().to_owned();
        let allowed = ["--name", "a", "--allow-host", "example.test", "--resolver", RESOLVER];
        user.detached(&allowed);
        ok(user.pvmm(["fork", "a", "--name", "b"]));
        let page = format!("{SERVER} example.test");
        for vm in ["a", "b"] {
            assert_eq!(fetch(&user, vm, "http://example.test/"), page);
        }
        let mac = |vm: &str| {
            ok(user.pvmm(["exec", vm, "--", "cat", "/sys/class/net/eth0/address"]))
                .text()
                .to_owned()
        };
        assert_ne!(mac("a"), mac("b"));
        ok(user.pvmm(["snapshot", "a", &snapshot]));
        // A snapshot has no policy: nothing is allowed unless it is said.
        ok(user.pvmm(["restore", &snapshot, "--name", "c", "--resolver", RESOLVER]));
        refused(&user, "c", "http://example.test/");
        let name = ["--allow-host", "example.test", "--resolver", RESOLVER];
        ok(user.pvmm([&["restore", &snapshot, "--name", "d"], &name[..]].concat()));
        assert_eq!(fetch(&user, "d", "http://example.test/"), page);
        ok(user.pvmm(["kill", "a", "b", "c", "d"]));
    });
}

/// Opens a connection in the guest, waits for bytes on it, and writes them or the error to a file.
/// A file `/tmp/go` makes it send.
const WAIT: &str = r#"
import errno, os, socket, sys, threading, time
peer = socket.create_connection((sys.argv[1], 7))
def wait():
    while True:
        try:
            got = peer.recv(100).decode() or "closed"
        except OSError as error:
            got = errno.errorcode[error.errno]
        with open("/tmp/got", "a") as file:
            file.write(got + " ")
        if got != "echo":
            return
threading.Thread(target=wait).start()
peer.send(b"echo")
while not os.path.exists("/tmp/go"):
    time.sleep(0.05)
peer.send(b"echo")
"#;

/// Waits until the process of `WAIT` has written this.
fn waits_for(user: &User, vm: &str, expected: &str) {
    let deadline = Instant::now() + Duration::from_secs(15);
    loop {
        let said = user.pvmm(["exec", vm, "--", "cat", "/tmp/got"]);
        if said.text().trim_end() == expected {
            return;
        }
        assert!(Instant::now() < deadline, "{vm}: {said:?} is not {expected:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn connection_on_which_a_guest_only_waits_is_reset_in_its_copies_and_goes_on_in_itself() {
    network::isolated(|| {
        let (_internet, user) = (internet(), User::new());
        let place = tempfile::tempdir().unwrap();
        let snapshot = place.path().join("snap").to_str().unwrap().to_owned();
        let allowed = format!("{SERVER}/32:7");
        let allowed = ["--allow", &allowed, "--resolver", RESOLVER];
        user.detached(&[&["--name", "a"], &allowed[..]].concat());
        ok(user.pvmm(["exec", "-d", "a", "--", "python3", "-c", WAIT, SERVER]));
        waits_for(&user, "a", "echo");
        ok(user.pvmm(["fork", "a", "--name", "b"]));
        waits_for(&user, "b", "echo ECONNRESET");
        ok(user.pvmm(["snapshot", "a", &snapshot]));
        ok(user.pvmm([&["restore", &snapshot, "--name", "c"], &allowed[..]].concat()));
        waits_for(&user, "c", "echo ECONNRESET");
        assert_eq!(status(&user, "a")["open_connections"], 1);
        ok(user.pvmm(["exec", "a", "--", "touch", "/tmp/go"]));
        waits_for(&user, "a", "echo echo");
        for verb in ["hibernate", "wake"] {
            let kept = user.command([verb, "a"]).env("XDG_DATA_HOME", place.path()).output();
            assert!(kept.unwrap().status.success());
        }
        waits_for(&user, "a", "echo echo ECONNRESET");
        ok(user.pvmm(["kill", "a", "b", "c"]));
    });
}

#[test]
fn vm_with_a_network_or_a_tap_is_rolled_back_and_goes_on() {
    network::isolated(|| {
        let (_internet, user) = (internet(), User::new());
        let allowed = ["--name", "a", "--allow-host", "example.test", "--resolver", RESOLVER];
        user.detached(&allowed);
        user.detached(&["--name", "t", "--net", "tap=auto,ip=10.9.0.2/24"]);
        for vm in ["a", "t"] {
            ok(user.pvmm(["checkpoint", vm]));
            ok(user.pvmm(["exec", vm, "--", "touch", "/tmp/gone"]));
            ok(user.pvmm(["rollback", vm]));
            let said = user.pvmm(["exec", vm, "--", "test", "-e", "/tmp/gone"]);
            assert_eq!(said.code, Some(1), "{said:?}");
        }
        assert_eq!(fetch(&user, "a", "http://example.test/"), format!("{SERVER} example.test"));
        // A card on a tap has no policy, so one is refused and not ignored.
        let refused = user.pvmm(["fork", "t", "--allow-host", "example.test"]);
        assert_eq!(
            (refused.code, refused.stderr.contains("--allow")),
            (Some(2), true),
            "{refused:?}"
        );
        ok(user.pvmm(["kill", "a", "t"]));
    });
}

#[test]
fn network_process_that_is_killed_lets_nothing_pass_and_is_started_again() {
    network::isolated(|| {
        let (_internet, user) = (internet(), User::new());
        let vm = user.detached(&["--allow-host", "example.test", "--resolver", RESOLVER]);
        let killed = std::process::Command::new("pkill").args(["-9", "-x", "pvmm-egress"]).status();
        assert!(killed.unwrap().success());
        let deadline = Instant::now() + Duration::from_secs(20);
        while fetch(&user, &vm, "http://example.test/") != format!("{SERVER} example.test") {
            assert!(Instant::now() < deadline, "it is not started again");
        }
        ok(user.pvmm(["kill", &vm]));
    });
}

#[test]
fn network_process_is_confined_as_the_vm_is() {
    network::isolated(|| {
        let (_internet, user) = (internet(), User::new());
        let vm = user.detached(&["--net", "--resolver", RESOLVER]);
        let found = std::process::Command::new("pgrep").args(["-x", "pvmm-egress"]).output();
        let pid = String::from_utf8(found.unwrap().stdout).unwrap().trim().to_owned();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap_or_default().to_owned()
        };
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(field(set), "0000000000000000", "{set}");
        }
        assert!(field("Uid:").starts_with("19000"), "{status}");
        assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".into(), "2".into()));
        let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
        assert_eq!(mounts.lines().count(), 1, "{mounts}");
        ok(user.pvmm(["kill", &vm]));
    });
}
