//! System calls of the host that fail: the command then succeeds all the same, or says so in one
//! line and leaves nothing half-made.
//!
//! In a process with a system call filter a call that strace makes fail ends the process, because
//! the filter sees a call without a number. That is the death of a process, at a place of its own.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pvmm_tests::cli::{self, User};
use tempfile::TempDir;

use super::traces::{census, is_clean};

const ERRNOS: [&str; 5] = ["ENOMEM", "ENOSPC", "EMFILE", "EINTR", "EIO"];
const VERBS: [&str; 5] = ["kill", "snapshot", "fork", "restore", "run"];
/// Calls that cannot fail, and the one that strace itself makes to start the command.
const NEVER: [&str; 5] = ["exit", "exit_group", "rt_sigreturn", "restart_syscall", "execve"];
/// The longest time of one command.
const PATIENCE: Duration = Duration::from_secs(60);

/// A call of some process of a command: the `number`th of its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Call {
    number: usize,
    name: String,
}

/// The end of a traced command.
#[derive(Debug)]
struct Traced {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    /// The lines of the calls that were made to fail.
    injected: Vec<String>,
    calls: Vec<Call>,
}

/// A VM, a snapshot of it, and commands under strace beside it.
struct Rig {
    user: User,
    place: TempDir,
    vm: String,
}

impl Rig {
    fn new() -> Self {
        let user = User::new();
        let place = tempfile::tempdir().unwrap();
        let vm = user.detached(&["--net"]);
        let rig = Self { user, place, vm };
        rig.plain(&["snapshot", &rig.vm, &rig.path("kept")]);
        rig
    }

    fn path(&self, name: &str) -> String {
        self.place.path().join(name).to_str().unwrap().to_owned()
    }

    /// Runs a command that must succeed, and returns its output.
    fn plain(&self, args: &[&str]) -> String {
        let said = self.user.pvmm(args);
        assert_eq!(said.code, Some(0), "{args:?}: {said:?}");
        said.text().to_owned()
    }

    /// Runs a command under strace. `fault` is a call and the error that it gets instead.
    fn traced(&self, args: &[&str], fault: Option<(&Call, &str)>) -> (Traced, Child) {
        let log = self.place.path().join("trace");
        let _ = fs::remove_file(&log);
        let mut command = Command::new("strace");
        command.args(["-f", "-q", "-o", log.to_str().unwrap(), "-e"]);
        match fault {
            None => command.arg("trace=all"),
            Some((Call { name, number }, errno)) => command
                // The first line shall be of the command itself.
                .args([&format!("trace=execve,{name}"), "-e"])
                .arg(format!("inject={name}:error={errno}:when={number}")),
        };
        command.arg(cli::binary()).args(args).stdin(Stdio::null());
        command.env("PVMM_RUNTIME_DIR", self.user.runtime());
        // The VM that a command leaves running must not keep its output open.
        let file = |name| fs::File::create(self.path(name)).unwrap();
        command.stdout(file("stdout")).stderr(file("stderr"));
        let begun = Instant::now();
        let mut strace = command.spawn().unwrap();
        // strace ends with the last process, which may be one of the VM.
        let code = loop {
            let ended = fs::read_to_string(&log).ok().and_then(|log| exit_code(&log));
            if let Some(code) = ended {
                break code;
            }
            if strace.try_wait().unwrap().is_some() {
                break fs::read_to_string(&log).ok().and_then(|log| exit_code(&log)).flatten();
            }
            if begun.elapsed() > PATIENCE {
                break None;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let text = |path: PathBuf| {
            String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
        };
        let log = text(log);
        let injected = log.lines().filter(|line| line.contains("(INJECTED)")).map(str::to_owned);
        let done = Traced {
            code,
            stdout: text(self.path("stdout").into()).trim_end().to_owned(),
            stderr: text(self.path("stderr").into()),
            injected: injected.collect(),
            calls: calls(&log),
        };
        (done, strace)
    }

    /// Runs a verb under strace and plain commands around it, after which the VM is alone again.
    fn act(&self, verb: &str, fault: Option<(&Call, &str)>) -> Traced {
        let (kept, new) = (self.path("kept"), self.path("new"));
        let target = if verb == "kill" { self.plain(&["fork", &self.vm]) } else { String::new() };
        let args: &[&str] = match verb {
            "run" => &["run", "-q", "--net", "--", "true"],
            "fork" => &["fork", &self.vm],
            "snapshot" => &["snapshot", "-q", &self.vm, &new],
            "restore" => &["restore", &kept],
            _ => &["kill", "--signal", "KILL", &target],
        };
        let (done, mut strace) = self.traced(args, fault);
        match (verb, done.code) {
            ("fork" | "restore", Some(0)) => drop(self.plain(&["kill", &done.stdout])),
            ("snapshot", Some(0)) => {
                self.plain(&["restore", &new, "--name", "again"]);
                self.plain(&["kill", "again"]);
            }
            ("snapshot", _) => assert!(!PathBuf::from(&new).exists(), "{done:?}"),
            ("kill", code) if code != Some(0) => {
                // It may have got far enough.
                self.user.pvmm(["kill", &target]);
            }
            _ => {}
        }
        let _ = fs::remove_dir_all(&new);
        // It has nothing to follow any more.
        let deadline = Instant::now() + PATIENCE;
        while strace.try_wait().unwrap().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = strace.kill();
        let _ = strace.wait();
        done
    }

    /// Checks that only the VM and its snapshot are there.
    fn is_alone(&self, what: &str) {
        let alive = self.plain(&["ps", "-q"]);
        assert!(self.vm.starts_with(&alive) && !alive.is_empty(), "{what}: {alive}");
        let mut files: Vec<_> = fs::read_dir(self.place.path())
            .unwrap()
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        files.sort();
        assert_eq!(files, ["kept", "stderr", "stdout", "trace"], "{what}");
    }
}

/// Returns how the first process of a trace has ended: its exit code, or none if a signal ended it.
fn exit_code(log: &str) -> Option<Option<i32>> {
    let first = log.split_whitespace().next()?;
    let of_first = |line: &&str| line.strip_prefix(first).is_some_and(|it| it.contains(" +++ "));
    let end = log.lines().find(of_first)?;
    let code = end.split_once("exited with ").and_then(|it| it.1.split(' ').next()?.parse().ok());
    Some(code)
}

/// Counts the calls in a trace: for each name as many as the process has that makes most of them.
fn calls(log: &str) -> Vec<Call> {
    let mut by_process: HashMap<(&str, &str), usize> = HashMap::new();
    for line in log.lines() {
        let Some((pid, rest)) = line.split_once(' ') else { continue };
        let name = rest.trim_start().split('(').next().unwrap_or_default();
        if !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            *by_process.entry((pid, name)).or_default() += 1;
        }
    }
    let mut most: BTreeMap<&str, usize> = BTreeMap::new();
    for ((_, name), count) in by_process {
        let known = most.entry(name).or_default();
        *known = count.max(*known);
    }
    let each = |(name, count): (&str, usize)| {
        let call = |number| Call { number, name: name.to_owned() };
        (1..=count).map(call).collect::<Vec<_>>()
    };
    let mut calls: Vec<_> =
        most.into_iter().filter(|(name, _)| !NEVER.contains(name)).flat_map(each).collect();
    calls.sort();
    calls
}

/// Makes calls fail, chosen by `choose` of all calls of a verb, each with the errors that `errnos`
/// returns for its place.
fn fail(
    choose: impl Fn(&str, Vec<Call>) -> Vec<Call>,
    errnos: impl Fn(usize) -> Vec<&'static str>,
) {
    let rig = Rig::new();
    // Those of the dynamic linker and of Rust's runtime, which end a program in their own ways.
    let first = rig.traced(&["--version"], None).0.calls;
    let before = census();
    let (mut injected, mut refused, mut place, mut faults) = (0, 0, 0, Vec::new());
    for verb in VERBS {
        let all = rig.act(verb, None);
        println!("errnos: {verb} makes {} calls", all.calls.len());
        assert_eq!(all.code, Some(0), "{all:?}");
        for call in choose(verb, all.calls) {
            place += 1;
            for errno in errnos(place) {
                let what = format!("{verb} with {errno} from {} {}", call.name, call.number);
                let done = rig.act(verb, Some((&call, errno)));
                rig.is_alone(&what);
                is_clean(&before, &what);
                injected += done.injected.len();
                refused += usize::from(done.code != Some(0));
                let errors = done.stderr.lines().filter(|line| line.starts_with("error:")).count();
                let typed = matches!((done.code, errors), (Some(2 | 125), 1));
                if !(done.code == Some(0) || typed || first.contains(&call)) {
                    println!("errnos: {what}: {done:?}");
                    faults.push(what);
                }
            }
        }
    }
    println!("errnos: {injected} calls failed, {refused} commands were refused");
    assert!(injected > 0 && faults.is_empty(), "{faults:?}");
    rig.plain(&["run", "-q", "--net", "--", "true"]);
    rig.plain(&["kill", &rig.vm]);
}

#[test]
fn command_of_which_some_system_call_fails_says_so_and_leaves_nothing() {
    // Some for each verb, spread over all names and numbers.
    let spread = |_: &str, all: Vec<Call>| {
        let step = (all.len() / 3).max(1);
        all.into_iter().skip(step / 2).step_by(step).take(3).collect()
    };
    fail(spread, |place| vec![ERRNOS[place % ERRNOS.len()]]);
}

#[test]
#[ignore = "make soak"]
fn soak_command_of_which_any_system_call_fails_says_so_and_leaves_nothing() {
    fail(|_, all| all, |_| ERRNOS.to_vec());
}
