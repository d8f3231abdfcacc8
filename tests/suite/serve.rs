//! `pvmm serve` with clients as published, on real guests.

use std::path::Path;
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
        .env("PYTHONPATH", cli::cached("serve/python"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{errors}");
    said
}

/// Runs a program of `tests/serve` that needs clients from npm; returns how often it says `ok`.
fn python_and_node(program: &str, words: &[&str]) -> usize {
    let modules = cli::cached("serve/npm/node_modules");
    let said = python(program, &[&[modules.to_str().unwrap()], words].concat());
    said.lines().filter(|line| line.contains(": ok")).count()
}

#[test]
fn published_client_finds_every_flow_that_it_knows() {
    let said = python("flows.py", &[]);
    assert_eq!(said.lines().filter(|line| line.contains(": ok (")).count(), 16, "{said}");
}

#[test]
fn published_mcp_client_uses_every_tool_and_leaves_nothing() {
    let said = python("mcp_client.py", &[]);
    assert_eq!(said.lines().filter(|line| line.contains(": ok")).count(), 14, "{said}");
}

#[test]
fn clients_of_e2b_find_every_flow_that_they_know() {
    let said = python("e2b_flows.py", &[]);
    assert_eq!(said.lines().filter(|line| line.contains(": ok (")).count(), 13, "{said}");
}

#[test]
fn clients_of_e2b_from_npm_find_every_flow_that_they_know() {
    assert_eq!(python_and_node("node_clients.py", &["e2b.mjs"]), 10);
}

#[test]
fn mcp_clients_from_npm_use_the_tools_over_stdio_and_http() {
    assert_eq!(python_and_node("node_clients.py", &["mcp.mjs"]), 5);
}

#[test]
fn clients_of_e2b_need_only_a_domain_over_tls() {
    assert_eq!(python_and_node("e2b_domain.py", &[]), 3);
}

#[test]
fn port_of_a_sandbox_is_shown_to_who_has_its_token() {
    let said = python("previews.py", &[]);
    assert_eq!(said.lines().filter(|line| line.contains(": ok (")).count(), 8, "{said}");
}

#[test]
fn sandbox_of_a_server_with_a_processor_baseline_sees_no_more() {
    python("baseline.py", &[]);
}

#[test]
fn service_that_is_killed_loses_no_sandbox_and_leaves_none() {
    assert_eq!(python("restart.py", &["10"]).trim(), "killed 10 times");
}

#[test]
#[ignore = "make soak"]
fn soak_service_that_is_killed_a_hundred_times_loses_no_sandbox() {
    assert_eq!(python("restart.py", &["100"]).trim(), "killed 100 times");
}
