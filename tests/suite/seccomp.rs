//! The policy of system calls against what the threads of real guests ask for.
//!
//! Tests of the suite run once more under strace. Each traced call of a confined thread must have a
//! rule, and each rule must have been needed, unless it is marked as rare.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use policy::{Policy, Rule};
use pvmm_tests::cli::User;
use pvmm_tests::firecracker::Firecracker;

#[path = "../../sandbox/seccomp/policy.rs"]
mod policy;

const POLICY: &str = include_str!("../../sandbox/seccomp/x86_64.policy");

/// Tests that together use everything that the policy permits.
const TRACED: &[&str] = &[
    "balloon::balloon_of_a_run_is_asked_for_memory_and_gives_it_back",
    "copies::running_vm_with_a_card_is_forked_and_every_copy_has_a_tap_of_its_own",
    "detached::detached_vm_is_listed_executes_and_is_killed",
    "detached::logs_of_a_detached_command_show_what_it_printed",
    "egress::vm_with_a_network_or_a_tap_is_rolled_back_and_goes_on",
    "firecracker::drive_is_replaced_and_grown_while_the_guest_runs_and_while_it_is_paused",
    "firecracker::first_load_keeps_its_working_set_and_later_loads_prefault_it",
    "firecracker::machine_in_a_file_starts_by_itself_and_ends_by_a_signal",
    "firecracker::machine_is_forked_while_it_runs_and_rolled_back",
    "firecracker::snapshot_goes_on_with_memory_from_a_page_server",
    "firecracker::snapshot_of_differences_lies_over_the_whole_one",
    "ports::ports_of_a_guest_without_network_serve_hundreds_and_end_with_ctrl_c",
    "run::run_whose_launcher_is_killed_leaves_nothing",
];
/// Calls that a guest causes without end. Tracing them takes too long, and without any of them
/// nothing works, so that their rules count as needed.
const HOT: &[&str] = &["futex", "read", "write", "epoll_wait", "sched_yield"];
/// Tests that together use every request of `ioctl`. A run of a vCPU is one too, so these are few.
const TRACED_REQUESTS: &[&str] = &[
    "copies::running_vm_with_a_card_is_forked_and_every_copy_has_a_tap_of_its_own",
    "firecracker::machine_is_forked_while_it_runs_and_rolled_back",
    "firecracker::snapshot_goes_on_with_memory_from_a_page_server",
    "firecracker::snapshot_of_differences_lies_over_the_whole_one",
];

/// `return` in classic BPF, with what a filter returns to allow a call and to send SIGSYS.
const RETURN: u64 = 0x06;
const ALLOW: u64 = 0x7fff_0000 << 32 | RETURN;
const TRAP: u64 = 0x0003_0000 << 32 | RETURN;
/// Loads the number of the call, and skips an instruction unless it is that of `ioctl`.
const LOAD_NUMBER: u64 = 0x20;
const UNLESS_IOCTL: u64 = (libc::SYS_ioctl as u64) << 32 | 1 << 24 | 0x15;

/// Returns how many threads of a process have a filter, and how many have none.
fn filtered(pid: u32) -> (usize, usize) {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let status = |task: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(task.unwrap().path().join("status")).unwrap()
    };
    let (with, without): (Vec<_>, Vec<_>) =
        tasks.map(status).partition(|status| status.contains("Seccomp:\t2\n"));
    (with.len(), without.len())
}

/// Writes a file of filters, in the format of Firecracker's compiler.
fn filter_file(path: &Path, vcpu: &[u64]) {
    let mut bytes = 3u64.to_le_bytes().to_vec();
    for (name, program) in [("vmm", &[ALLOW][..]), ("api", &[ALLOW]), ("vcpu", vcpu)] {
        bytes.extend((name.len() as u64).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend((program.len() as u64).to_le_bytes());
        bytes.extend(program.iter().flat_map(|word| word.to_le_bytes()));
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn every_thread_of_a_running_vm_has_a_filter() {
    let user = User::new();
    let id = user.detached(&[]);
    let record = fs::read(user.runtime().join(&id).join("vm.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let (with, without) = filtered(record["pid"].as_u64().unwrap() as u32);
    assert!(with >= 5 && without == 0, "{with} threads with a filter, {without} without");
    assert_eq!(user.pvmm(["kill", &id]).code, Some(0));
}

#[test]
fn filters_of_the_api_server_are_ours_or_none_or_those_of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("filters").display().to_string();
    filter_file(Path::new(&file), &[ALLOW]);
    for (flags, expected) in
        [(vec![], true), (vec!["--no-seccomp"], false), (vec!["--seccomp-filter", &file], true)]
    {
        let vm = Firecracker::with(&flags);
        vm.describe();
        vm.start();
        let (with, without) = filtered(vm.pid());
        assert_eq!((with == 0, without == 0), (!expected, expected), "{flags:?}");
    }
}

#[test]
fn filter_that_forbids_what_a_vcpu_needs_ends_the_process_with_code_148() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("filters").display().to_string();
    filter_file(Path::new(&file), &[LOAD_NUMBER, UNLESS_IOCTL, TRAP, ALLOW]);
    let mut vm = Firecracker::with(&["--seccomp-filter", &file]);
    vm.describe();
    let body = r#"{"action_type":"InstanceStart"}"#;
    let head = format!("PUT /actions HTTP/1.1\r\nContent-Length: {}\r\n\r\n", body.len());
    // The process may end before it answers.
    let mut client = vm.connect();
    client.write_all([head.as_bytes(), body.as_bytes()].concat().as_slice()).unwrap();
    assert_eq!(vm.ends(), Some(148));

    fs::write(&file, "no filters").unwrap();
    let flags = ["--config-file", &file, "--seccomp-filter", &file];
    assert_eq!(Firecracker::with_no_api(&flags).ends(), Some(1));
}

#[test]
#[ignore = "make soak"]
fn soak_policy_has_a_rule_for_every_traced_call_and_no_rule_that_nothing_needs() {
    let dir = tempfile::tempdir().unwrap();
    trace(dir.path(), &format!("!ioctl,{}", HOT.join(",")), TRACED);
    // The other three are how a thread and its kind are recognized.
    trace(dir.path(), "ioctl,prctl,seccomp,clone", TRACED_REQUESTS);

    let policy = Policy::parse(POLICY).unwrap();
    let mut missing = BTreeSet::new();
    let mut needed = BTreeSet::new();
    for (kind, calls) in traced(dir.path()) {
        let thread = policy.threads.iter().find(|thread| thread.name == kind).unwrap();
        for call in calls {
            match thread.rules.iter().find(|rule| call.is_permitted_by(rule)) {
                Some(rule) => drop(needed.insert(rule.line)),
                None => drop(missing.insert(format!("{kind}: {}", call.text))),
            }
        }
    }
    let rules = || policy.threads.iter().flat_map(|thread| &thread.rules);
    let hot = |rule: &Rule| HOT.contains(&rule.call.as_str());
    let refused = |rule: &Rule| rule.error.is_some();
    let idle =
        |rule: &&Rule| !rule.rare && !hot(rule) && !refused(rule) && !needed.contains(&rule.line);
    let unneeded: BTreeSet<_> =
        rules().filter(idle).map(|rule| format!("{}: {}", rule.line, rule.call)).collect();
    assert_eq!((missing, unneeded), Default::default());
}

/// Runs tests of this suite under strace, with a file of `dir` for each thread.
fn trace(dir: &Path, calls: &str, tests: &[&str]) {
    let ran = Command::new("strace")
        .args(["-ff", "--seccomp-bpf", "--pidns-translation", "-qq", "-X", "raw", "-s", "16", "-o"])
        .arg(dir.join("t"))
        .args(["-e", &format!("trace={calls}")])
        .arg(std::env::current_exe().unwrap())
        .args(tests)
        .args(["--exact", "--test-threads=1"])
        .env("PVMM_BOOT_TIMEOUT", "300s")
        .status();
    assert!(ran.unwrap().success());
}

/// A traced system call.
struct Call {
    text: String,
    name: String,
    /// Numbers only; anything else is none.
    arguments: Vec<Option<u64>>,
}

impl Call {
    /// Reads a line of strace, such as `ioctl(17, 0xae80, 0) = 0`, of a call that has ended.
    fn parse(line: &str) -> Option<Self> {
        (!line.contains("<unfinished")).then_some(())?;
        let (name, rest) = line.split_once('(')?;
        name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_').then_some(())?;
        let mut arguments: Vec<_> = split(rest).into_iter().map(number).collect();
        if name == "clone" {
            // The only call whose arguments strace prints with names, in another order.
            let flags = rest.split("flags=").nth(1)?;
            arguments = vec![number(flags.split([',', ')']).next()?)];
        }
        Some(Self { text: line.to_owned(), name: name.to_owned(), arguments })
    }

    fn is_permitted_by(&self, rule: &Rule) -> bool {
        let argument = |index: u8| self.arguments.get(usize::from(index)).copied().flatten();
        rule.call == self.name
            && rule.conditions.iter().all(|it| argument(it.argument).is_some_and(|a| it.holds(a)))
    }
}

/// Splits arguments at commas that are in no string, structure or list.
fn split(text: &str) -> Vec<&str> {
    let (mut depth, mut quoted, mut begin, mut parts) = (0, false, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            _ if quoted => {}
            '{' | '[' | '(' => depth += 1,
            ')' if depth == 0 => {
                parts.push(text[begin..at].trim());
                return parts;
            }
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[begin..at].trim());
                begin = at + 1;
            }
            _ => {}
        }
    }
    parts.push(text[begin..].trim());
    parts
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None if text == "NULL" => Some(0),
        None => text.parse::<i64>().ok().map(|number| number as u64),
    }
}

/// Returns the calls of confined threads by the kind of the thread, from one file for each thread.
fn traced(dir: &Path) -> BTreeMap<&'static str, Vec<Call>> {
    let mut threads = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if let Some(id) = name.strip_prefix("t.").and_then(|id| id.parse::<u64>().ok()) {
            let text = String::from_utf8_lossy(&fs::read(entry.path()).unwrap()).into_owned();
            threads.insert(id, text.lines().map(str::to_owned).collect::<Vec<_>>());
        }
    }
    let installs = |line: &String| line.starts_with("seccomp(0x1, ");
    let mut calls: BTreeMap<&'static str, Vec<Call>> = BTreeMap::new();
    for lines in threads.values() {
        let Some(at) = lines.iter().position(installs) else { continue };
        let Some(kind) = kind(&lines[..at]) else { continue };
        let mut confined = vec![&lines[at + 1..]];
        while let Some(lines) = confined.pop() {
            calls.entry(kind).or_default().extend(lines.iter().filter_map(|l| Call::parse(l)));
            // Threads that a confined one starts inherit its filter, and may add their own.
            for begun in
                lines.iter().filter_map(|line| begun(line)).filter_map(|id| threads.get(&id))
            {
                let at = begun.iter().position(installs).map_or(begun.len(), |at| at + 1);
                confined.push(&begun[..at]);
                if self::kind(&begun[..at]) == Some("api") {
                    let copier = begun[at..].iter().filter_map(|line| Call::parse(line));
                    calls.entry("copier").or_default().extend(copier);
                }
            }
        }
    }
    calls
}

/// Returns the thread or process that a call has begun, as strace numbers it: the jail numbers it
/// anew, and strace adds its own number in a comment.
fn begun(line: &str) -> Option<u64> {
    let ids = line.strip_prefix("clone(")?.rsplit("= ").next()?;
    let own = ids.split_once("/* ").map_or(ids, |(_, own)| own);
    own.split(' ').next()?.parse().ok()
}

/// Returns the kind of a thread by the name that it has given itself.
fn kind(lines: &[String]) -> Option<&'static str> {
    let named = lines.iter().rev().find_map(|line| line.strip_prefix("prctl(0xf, \""));
    match named.unwrap_or("api") {
        name if name.starts_with("pvmm-vcpu") || name.starts_with("fc_vcpu") => Some("vcpu"),
        name if name.starts_with("pvmm-devices") => Some("devices"),
        name if name.starts_with("pvmm-console") => Some("console"),
        name if name.starts_with("pvmm-pages") => Some("pages"),
        name if name.starts_with("console-log") => Some("log"),
        name if name.starts_with("pvmm-vmm") => Some("control"),
        "api" => Some("api"),
        _ => None,
    }
}
