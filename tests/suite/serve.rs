//! `pvmm serve` with clients as published, on real guests.

use std::path::{Path, PathBuf};
use std::process::Command;

use pvmm_tests::cli::{self, User};
use tempfile::TempDir;

/// Runs a program of `tests/serve` with the path of `pvmm` and more words; it must succeed.
fn python(program: &str, words: &[&str]) -> String {
    let user = User::new();
    assert_eq!(user.pvmm(["template", "bake", "base"]).code, Some(0));
    let data = TempDir::new().unwrap();
    let output = Command::new("python3")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("serve").join(program))
        .arg(cli::binary())
        .args(words)
        .env("PVMM_RUNTIME_DIR", user.runtime())
        .env("XDG_DATA_HOME", data.path())
        .env("PYTHONPATH", clients())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{errors}");
    said
}

/// The folder into which `cargo xtask` has installed the clients.
fn clients() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")));
    cache.unwrap().join("pvmm/serve/python")
}

#[test]
fn published_client_finds_every_flow_that_it_knows() {
    let said = python("flows.py", &[]);
    assert_eq!(said.lines().filter(|line| line.contains(": ok (")).count(), 12, "{said}");
}

#[test]
fn published_mcp_client_uses_every_tool_and_leaves_nothing() {
    let said = python("mcp_client.py", &[]);
    assert_eq!(said.lines().filter(|line| line.contains(": ok")).count(), 13, "{said}");
}

#[test]
fn clients_of_e2b_find_every_flow_that_they_know() {
    let said = python("e2b_flows.py", &[]);
    assert_eq!(said.lines().filter(|line| line.contains(": ok (")).count(), 13, "{said}");
}

#[test]
fn service_that_is_killed_loses_no_sandbox_and_leaves_none() {
    assert_eq!(python("restart.py", &["9"]).trim(), "killed 9 times");
}

#[test]
#[ignore = "make soak"]
fn soak_service_that_is_killed_a_hundred_times_loses_no_sandbox() {
    assert_eq!(python("restart.py", &["100"]).trim(), "killed 100 times");
}
