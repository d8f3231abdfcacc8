//! Secrets that never enter the sandbox: a real guest uses one, and it is looked for everywhere.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use pvmm_tests::cli::{Said, User};
use pvmm_tests::internet::{Internet, OTHER, RESOLVER, SERVER};
use pvmm_tests::network;
use serde_json::Value;

const VALUE: &str = "hunter2-5a1f0c77e2b94d36";
const PAGE: u64 = 4096;
/// Bits of the last byte of an entry of a page map.
const PRESENT: u8 = 1 << 7;
const SWAPPED: u8 = 1 << 6;

/// Fetches a page with the secret in a header; verifies the server if told so.
const FETCH: &str = r#"
import os, ssl, sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + os.environ["TOKEN"]})
context = None if sys.argv[2] == "verified" else ssl._create_unverified_context()
try:
    print(urllib.request.urlopen(request, timeout=60, context=context).read().decode())
except Exception as error:
    print(repr(error))
"#;

fn ok(said: Said) -> Said {
    assert_eq!(said.code, Some(0), "{said:?}");
    said
}

fn fetch(user: &User, vm: &str, url: &str, how: &str) -> String {
    ok(user.pvmm(["exec", vm, "--", "python3", "-c", FETCH, url, how])).text().to_owned()
}

fn internet() -> Internet {
    Internet::new(&[("example.test", SERVER), ("other.test", OTHER)])
}

/// Returns the last Authorization that a server has seen.
fn last_seen(internet: &Internet) -> String {
    let seen = internet.seen();
    let last = seen.iter().rev().find_map(|line| line.strip_prefix("authorization "));
    last.unwrap_or_default().to_owned()
}

fn placeholder(user: &User, vm: &str) -> String {
    let said = ok(user.pvmm(["exec", vm, "--", "sh", "-c", "echo $TOKEN"]));
    let shown = said.text().to_owned();
    assert!(shown.starts_with("pvmm-secret-") && shown.len() == 44, "{shown}");
    shown
}

/// Returns the files below a folder that contain `text`.
fn files_with(text: &str, dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    // A folder that is gone has none.
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() {
            found.extend(files_with(text, &path));
        } else if kind.is_file() && has(&mut File::open(&path).unwrap(), text) {
            found.push(path);
        }
    }
    found
}

/// Returns whether `text` is in what is left to read.
fn has(from: &mut impl Read, text: &str) -> bool {
    let mut window = vec![0; 1 << 20];
    let mut kept = 0;
    while let Ok(count @ 1..) = from.read(&mut window[kept..]) {
        let end = kept + count;
        if is_in(&window[..end], text) {
            return true;
        }
        kept = end.min(text.len() - 1);
        window.copy_within(end - kept..end, 0);
    }
    false
}

fn is_in(bytes: &[u8], text: &str) -> bool {
    let (first, text) = (text.as_bytes()[0], text.as_bytes());
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|byte| *byte == first) {
        if rest[at..].starts_with(text) {
            return true;
        }
        rest = &rest[at + 1..];
    }
    false
}

/// Returns for each process of a name whether `text` is in its memory, arguments or environment.
fn processes_with(text: &str, name: &str) -> Vec<bool> {
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path()) {
        if fs::read_to_string(process.join("comm")).is_ok_and(|comm| comm.trim() == name) {
            found.push(is_in_process(text, &process));
        }
    }
    found
}

fn is_in_process(text: &str, process: &Path) -> bool {
    let file = |name: &str| fs::read(process.join(name)).unwrap_or_default();
    if ["cmdline", "environ"].iter().any(|name| is_in(&file(name), text)) {
        return true;
    }
    let maps = String::from_utf8(file("maps")).unwrap();
    let memory = File::open(process.join("mem")).unwrap();
    let entries = File::open(process.join("pagemap")).unwrap();
    maps.lines().filter(|line| line.contains(" r")).any(|line| {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
        let mut present = vec![0; ((to - from) / PAGE * 8) as usize];
        // Special mappings have no entries.
        let _ = entries.read_exact_at(&mut present, from / PAGE * 8);
        let present = present.chunks(8).map(|entry| entry[7] & (PRESENT | SWAPPED) != 0);
        // The end of the page before, and a page: the text may begin in one and end in the next.
        let mut bytes = vec![0; text.len() - 1 + PAGE as usize];
        present.enumerate().filter(|(_, present)| *present).any(|(page, _)| {
            bytes.copy_within(PAGE as usize.., 0);
            let (_, room) = bytes.split_at_mut(text.len() - 1);
            memory.read_exact_at(room, from + page as u64 * PAGE).is_ok() && is_in(&bytes, text)
        })
    })
}

#[test]
fn secret_reaches_its_host_and_is_nowhere_in_the_sandbox() {
    network::isolated(|| {
        let (internet, user) = (internet(), User::new());
        let place = tempfile::tempdir().unwrap();
        let authority = internet.authority();
        let given = ["--secret", "TOKEN@example.test", "--secret-ca", authority.to_str().unwrap()];
        let rules = ["--allow-host", "example.test:80", "--allow-host", "other.test"];
        let own = ["run", "-d", "--name", "a", "--memory", "256M", "--resolver", RESOLVER];
        let args = [&own[..], &given, &rules].concat();
        let started = user.command(args).env("TOKEN", VALUE).output().unwrap();
        assert!(started.status.success(), "{started:?}");

        // Its host gets the value, over TLS that the guest verifies.
        let shown = placeholder(&user, "a");
        let page = format!("{SERVER} example.test");
        assert_eq!(fetch(&user, "a", "https://example.test/", "verified"), page);
        assert_eq!(last_seen(&internet), format!("https {SERVER} Bearer {VALUE}"));
        // Another host, and the same without TLS, get the placeholder.
        let page_of_other = format!("{OTHER} other.test");
        assert_eq!(fetch(&user, "a", "https://other.test/", "unverified"), page_of_other);
        assert_eq!(last_seen(&internet), format!("https {OTHER} Bearer {shown}"));
        assert_eq!(fetch(&user, "a", "http://example.test/", "verified"), page);
        assert_eq!(last_seen(&internet), format!("http {SERVER} Bearer {shown}"));

        // It is shown by name, host and use.
        let status: Value =
            serde_json::from_slice(&ok(user.pvmm(["net", "a", "--json"])).stdout).unwrap();
        let secret = &status["secrets"][0];
        assert_eq!((&secret["name"], &secret["uses"]), (&"TOKEN".into(), &1.into()));
        let table = ok(user.pvmm(["net", "a"]));
        assert!(table.text().contains("TOKEN") && !table.text().contains(VALUE), "{table:?}");

        // A fork has it too, and so has the VM after a rollback.
        ok(user.pvmm(["fork", "a", "--name", "b"]));
        ok(user.pvmm(["checkpoint", "a"]));
        ok(user.pvmm(["rollback", "a"]));
        for vm in ["a", "b"] {
            assert_eq!(placeholder(&user, vm), shown);
            assert_eq!(fetch(&user, vm, "https://example.test/", "verified"), page);
            assert_eq!(last_seen(&internet), format!("https {SERVER} Bearer {VALUE}"));
        }

        // One process of each VM has it in memory, and one file of each VM's folder.
        assert_eq!(processes_with(VALUE, "pvmm-egress"), [true, true]);
        assert_eq!(processes_with(VALUE, "pvmm-vmm"), [false, false]);
        assert_eq!(processes_with(VALUE, "pvmm-supervisor"), [false, false]);
        let files = files_with(VALUE, &user.runtime());
        assert_eq!(files.len(), 2, "{files:?}");
        for file in &files {
            assert!(file.ends_with("secrets.json"), "{files:?}");
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
        }
        // The guest's memory has the placeholder, so that the search is one.
        let snapshot = place.path().join("snap");
        ok(user.pvmm(["snapshot", "a", snapshot.to_str().unwrap()]));
        assert!(!files_with(&shown, &snapshot).is_empty());
        assert_eq!(files_with(VALUE, &snapshot), Vec::<PathBuf>::new());

        // A restored VM has it only if it is given again.
        let restore = ["restore", snapshot.to_str().unwrap(), "--resolver", RESOLVER, "--name"];
        ok(user.pvmm([&restore[..], &["c", "--allow-host", "example.test"]].concat()));
        assert_eq!(fetch(&user, "c", "https://example.test/", "unverified"), page);
        assert_eq!(last_seen(&internet), format!("https {SERVER} Bearer {shown}"));
        let args = [&restore[..], &["d"], &given].concat();
        let restored = user.command(args).env("TOKEN", VALUE).output().unwrap();
        assert!(restored.status.success(), "{restored:?}");
        assert_ne!(placeholder(&user, "d"), shown);
        assert_eq!(fetch(&user, "d", "https://example.test/", "verified"), page);
        assert_eq!(last_seen(&internet), format!("https {SERVER} Bearer {VALUE}"));

        // A VM that has ended has none.
        ok(user.pvmm(["kill", "a", "b", "c", "d"]));
        assert_eq!(files_with(VALUE, &user.runtime()), Vec::<PathBuf>::new());
    });
}

#[test]
fn secret_in_a_wrong_form_is_refused_in_one_line_without_its_value() {
    let user = User::new();
    for (flags, why) in [
        (vec!["--secret", VALUE], "not a secret and its host"),
        (vec!["--secret", "A=hunter2-x"], "not a secret and its host"),
        (vec!["--secret", "hunter2-x@example.test"], "no such variable"),
        (vec!["--secret", "A=env:PVMM_UNSET@example.test"], "no such variable"),
        (vec!["--secret", "A=file:/nonexistent@example.test"], "/nonexistent"),
        (vec!["--secret", "A=hunter2-x@*.example.test"], "not a host name"),
        (vec!["--secret", "A=hunter2-x@1.2.3.4"], "not a host name"),
        (vec!["--secret", "1A=hunter2-x@example.test"], "letters, digits"),
        (vec!["--secret", "A=@example.test"], "the value is empty"),
        (vec!["--secret", "A=hunter2-x\r\nX: y@example.test"], "line end"),
        (vec!["--secret", "A=hunter2-x@a.test", "--secret", "A=hunter2-y@a.test"], "given twice"),
        (vec!["--secret", "A=hunter2-x@a.test", "--secret-ca", "/etc/passwd"], "--secret-ca"),
        (vec!["--secret-ca", "/etc/passwd"], "--secret-ca"),
        (vec!["--secret", "A=hunter2-x@a.test", "--net", "tap=t0"], "--secret"),
    ] {
        let said = user.pvmm([&["run"][..], &flags, &["--", "true"]].concat());
        assert_eq!(said.code, Some(2), "{said:?}");
        assert!(said.stderr.contains(why) && !said.stderr.contains("hunter2"), "{said:?}");
    }
}
