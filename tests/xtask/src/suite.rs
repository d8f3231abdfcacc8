//! `cargo xtask test`: runs every test, on a machine that may have only Rust.
//!
//! Unit tests run here. The suite of real guests is one program, which runs where KVM is: once
//! here, or in shares in several nested hosts at once.

mod shares;

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use self::shares::Queue;
use crate::nested_host::background;
use crate::on_kvm::{self, NestedPlace, OnKvmError, Ran};
use crate::probe::{self, Found};
use crate::{artifacts, cargo, checkout, packages, progress, removals, report, serve};

/// The exit code of the suite's program if a test has failed.
const FAILED: u8 = 101;

/// The maximum number of lost hosts in one run; more are not a coincidence.
const HOSTS_LOST: usize = 3;

/// The first test writes a snapshot that the second one reads after the nested host has booted
/// again.
const FIRST_BOOT: &str = "reboot::first_boot_writes_a_snapshot";
const SECOND_BOOT: &str = "reboot::soak_snapshot_of_an_earlier_boot_goes_on";

/// The test whose guest needs more packages than `base` has.
const OF_SCIENCE: &str = "code::soak_figures_and_tables_of_real_packages_come_out";

/// The packages that the tests use on this machine in addition to a minimal Debian.
const PACKAGES: [&str; 15] = [
    "busybox-static",
    "e2fsprogs",
    "iproute2",
    "kmod",
    "less",
    "nodejs",
    "openssl",
    "procps",
    "python3",
    "python3-pip",
    "skopeo",
    "strace",
    "umoci",
    "xfsprogs",
    "xz-utils",
];

/// The modules of the suite that [`security`] runs.
const SECURITY: [&str; 6] = ["egress::", "errnos::", "jail::", "jailed::", "seccomp::", "traces::"];

/// The long test of the agent, which needs no guest.
const OF_THE_AGENT: &str = "soak_file_of_2_gib_of_real_data_matches_with_flat_memory";

/// Runs every test. `arguments` go to the suite.
pub fn run(arguments: &[OsString]) -> ExitCode {
    let test = || -> Result<u8, Box<dyn Error>> {
        packages::install(&PACKAGES)?;
        cargo::run(&["test", "--workspace", "--exclude", "pvmm-tests"])?;
        serve::test_sdk()?;
        suite(arguments)
    };
    finish("test", test())
}

/// Runs the suite's long tests, which [`run`] leaves out.
pub fn soak(filter: OsString) -> ExitCode {
    let soak = || -> Result<u8, Box<dyn Error>> {
        if OF_SCIENCE.contains(&*filter.to_string_lossy()) {
            artifacts::prepare_science()?;
        }
        if SECOND_BOOT.contains(&*filter.to_string_lossy()) {
            let code = suite(&["--ignored".into(), "--exact".into(), FIRST_BOOT.into()])?;
            if code != 0 {
                return Ok(code);
            }
        }
        if OF_THE_AGENT.contains(&*filter.to_string_lossy()) {
            let agent = ["test", "--package", "pvmm-guest-agent", "--test", "agent", "--"];
            cargo::run(&[&agent[..], &["--ignored", "--nocapture", OF_THE_AGENT]].concat())?;
        }
        suite(&["--ignored".into(), "--nocapture".into(), filter])
    };
    finish("soak", soak())
}

/// Runs the tests of the jail, the system call filters and the network policy; with `long` also
/// those that take hours. They print how much each has tried.
pub fn security(long: bool) -> ExitCode {
    let test = || -> Result<u8, Box<dyn Error>> {
        packages::install(&PACKAGES)?;
        let packages = ["--package", "pvmm-egress", "--package", "pvmm-jailer"];
        let counted = ["--", "--show-output"];
        cargo::run(&[&["test", "--release"], &packages[..], &counted].concat())?;
        removals::run(1)?;
        let mut arguments: Vec<OsString> = vec!["--nocapture".into()];
        if long {
            arguments.push("--include-ignored".into());
        }
        arguments.extend(SECURITY.map(OsString::from));
        suite(&arguments)
    };
    finish("test-security", test())
}

fn finish(verb: &str, result: Result<u8, Box<dyn Error>>) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("{verb}: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Runs the suite where guests run and returns its exit code.
fn suite(arguments: &[OsString]) -> Result<u8, Box<dyn Error>> {
    packages::install(&PACKAGES)?;
    let programs = ["--package", "pvmm-launcher", "--package", "pvmm-jailer"];
    cargo::run(&[&["build", "--release"], &programs[..]].concat())?;
    // The launcher is built in the same command, so that the common libraries are built once.
    let packages = ["pvmm", "pvmm-launcher", "pvmm-jailer"].map(|name| ["--package", name]);
    let examples = [packages.as_flattened(), &["--examples"]].concat();
    cargo::run(&[&["build", "--release"], &examples[..]].concat())?;
    let suite = cargo::build_test("pvmm-tests", "suite")?;

    build_kernel()?;
    let artifacts = artifacts::prepare()?;
    artifacts::prepare_tools()?;
    serve::install_python()?;
    serve::install_npm()?;
    artifacts::prepare_registry()?;
    serve::install_store()?;
    artifacts.with_stock_initrd()?;
    let stock = artifacts.with_debian_kernel()?;
    progress::step(format!("guest kernels: {}, {}", artifacts.kernel.label, stock.label));

    std::env::set_current_dir(checkout::root())?;
    match probe::find() {
        Found::Here(what) => {
            progress::step(format!("running the suite here: {what}"));
            Ok(on_kvm::run_here(&command(&suite, arguments)))
        }
        Found::NotHere(reason) => {
            progress::step(format!(
                "no usable KVM here ({reason}): the suite runs in a nested host"
            ));
            let tests = list(&suite, arguments)?;
            let hosts = shares::hosts(tests.len());
            if background::status().is_some() || hosts < 2 {
                let mut tests = Some(tests);
                return Ok(in_one_host(
                    &suite,
                    || Ok(tests.take().unwrap_or_default()),
                    arguments,
                )?);
            }
            progress::step(format!("in {hosts} nested hosts at once"));
            fs::create_dir_all(checkout::scratch())?;
            let path = checkout::scratch().join(format!("queue-{}", std::process::id()));
            let queue = Queue::write(path, &tests)?;
            let code = shares::run(&suite, &queue, hosts, arguments);
            queue.remove();
            Ok(code?)
        }
    }
}

/// Runs tests of a queue in one nested host until there are no more, and returns an exit code.
pub fn share(suite: &Path, queue: PathBuf, arguments: &[OsString]) -> ExitCode {
    let queue = Queue::open(queue);
    let ran = in_one_host(suite, || queue.take(), arguments);
    finish("suite", ran.map_err(Into::into))
}

/// Runs tests of the suite in a nested host, or in the next one if a host dies: those that `take`
/// returns, until it returns none. Returns the first exit code that is not 0.
fn in_one_host(
    suite: &Path,
    mut take: impl FnMut() -> io::Result<Vec<String>>,
    arguments: &[OsString],
) -> io::Result<u8> {
    fs::create_dir_all(checkout::scratch())?;
    let log = checkout::scratch().join(format!("suite-{}", std::process::id()));
    let mut place = match NestedPlace::open() {
        Ok(place) => place,
        Err(e) => return Ok(on_kvm::code(Err(e))),
    };
    let mut run = |arguments: &[OsString]| {
        let mut argv = command(suite, arguments);
        argv.extend(["--logfile".into(), log.as_os_str().to_owned()]);
        let _ = fs::remove_file(&log);
        let ran = place.run_once(&argv);
        let ended = fs::read_to_string(&log).unwrap_or_default();
        let _ = fs::remove_file(&log);
        Ok((ran?, ended))
    };
    let (mut first_code, mut lost_in) = (0, Vec::new());
    loop {
        let tests = take()?;
        if tests.is_empty() {
            return Ok(first_code);
        }
        let arguments = selecting(arguments, &tests.iter().collect::<Vec<_>>());
        let ran = run_in_hosts(&tests, &arguments, &mut lost_in, &mut run);
        let hosts_fail = ran.is_err();
        let code = on_kvm::code(ran);
        first_code = if first_code == 0 { code } else { first_code };
        if hosts_fail {
            return Ok(first_code);
        }
    }
}

/// Returns the command line of the suite's program with `arguments`.
fn command(suite: &Path, arguments: &[OsString]) -> Vec<OsString> {
    let mut argv = vec![suite.as_os_str().to_owned()];
    argv.extend_from_slice(arguments);
    // Tests run one at a time, because each checks that it left nothing behind on the whole host.
    if !arguments.iter().any(|argument| argument.to_string_lossy().starts_with("--test-threads")) {
        argv.push("--test-threads=1".into());
    }
    argv
}

/// Returns the tests that `arguments` select, in the order in which they run.
fn list(suite: &Path, arguments: &[OsString]) -> Result<Vec<String>, Box<dyn Error>> {
    let output =
        Command::new(suite).args(["--list", "--format", "terse"]).args(arguments).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Runs the suite with the given arguments on one host. Returns how the run ended, and the log of
/// the tests that ended.
type RunOnHost<'a> = dyn FnMut(&[OsString]) -> Result<(Ran, String), OnKvmError> + 'a;

/// Runs the tests with `run`, on several hosts one after the other if necessary.
///
/// A test that fails is a failure. Only if a host dies during a test, which need not be the test's
/// fault, the test runs once more on another host, followed by the tests that had not begun.
/// `lost_in` has the tests during which hosts died.
fn run_in_hosts(
    tests: &[String],
    arguments: &[OsString],
    lost_in: &mut Vec<String>,
    run: &mut RunOnHost<'_>,
) -> Result<u8, OnKvmError> {
    let (mut arguments, mut ended) = (arguments.to_vec(), Vec::new());
    let mut any_failed = false;
    loop {
        let (ran, log) = run(&arguments)?;
        any_failed |= log.lines().any(|line| line.starts_with("failed"));
        ended.extend(log.lines().filter_map(|line| line.rsplit(' ').next()).map(str::to_owned));
        let console = match ran {
            Ran::Exited(0) if any_failed => return Ok(FAILED),
            Ran::Exited(code) => return Ok(code),
            Ran::HostLost { console, .. } => console,
        };
        let left: Vec<&String> = tests.iter().filter(|test| !ended.contains(test)).collect();
        let Some(current) = left.first() else { return Ok(if any_failed { FAILED } else { 0 }) };
        progress::step(format!(
            "THE NESTED HOST DIED while {current} ran; its console ended with:\n{console}"
        ));
        if lost_in.contains(*current) || lost_in.len() == HOSTS_LOST {
            return Err(OnKvmError::HostLost { console });
        }
        lost_in.push((*current).clone());
        progress::step(format!(
            "on another host: {current} again, then the {} after it",
            left.len() - 1
        ));
        arguments = selecting(&arguments, &left);
    }
}

/// Returns arguments that select exactly these tests, with the earlier flags.
fn selecting(arguments: &[OsString], tests: &[&String]) -> Vec<OsString> {
    let is_kept = |argument: &&OsString| {
        let text = argument.to_string_lossy();
        let kept = ["--ignored", "--include-ignored", "--nocapture", "--show-output"];
        kept.contains(&&*text) || text.starts_with("--test-threads=")
    };
    let mut selecting: Vec<OsString> = arguments.iter().filter(is_kept).cloned().collect();
    selecting.push("--exact".into());
    selecting.extend(tests.iter().map(OsString::from));
    selecting
}

/// Builds the guest kernel in a separate process, because the build handles signals in its own way.
fn build_kernel() -> Result<(), Box<dyn Error>> {
    progress::step("cargo xtask kernel");
    let mut xtask = Command::new(checkout::program()?);
    if xtask.arg("kernel").stdout(Stdio::null()).status()?.success() {
        return Ok(());
    }
    Err("the guest kernel was not built".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the tests a, b and c on simulated hosts. Each call has an outcome, a log, and the
    /// arguments that it must get.
    fn played(calls: &[(Option<u8>, &str, &[&str])]) -> Result<u8, OnKvmError> {
        let tests = ["a", "b", "c"].map(str::to_owned);
        let mut calls = calls.iter();
        let mut run = |arguments: &[OsString]| {
            let (code, log, asked) = calls.next().expect("no more hosts");
            assert_eq!(arguments.iter().collect::<Vec<_>>(), *asked);
            let lost = Ran::HostLost { stdin_used: false, console: String::new() };
            Ok((code.map_or(lost, Ran::Exited), (*log).to_owned()))
        };
        let code =
            run_in_hosts(&tests, &["--nocapture".into(), "x".into()], &mut Vec::new(), &mut run);
        assert!(calls.next().is_none());
        code
    }

    const FIRST: &[&str] = &["--nocapture", "x"];

    #[test]
    fn test_that_fails_is_a_failure_and_not_run_again() {
        assert_eq!(played(&[(Some(101), "ok a\nfailed b\nok c\n", FIRST)]).unwrap(), 101);
        assert_eq!(played(&[(Some(0), "ok a\nok b\nok c\n", FIRST)]).unwrap(), 0);
    }

    #[test]
    fn host_that_dies_gives_only_the_running_test_another() {
        let again: &[&str] = &["--nocapture", "--exact", "b", "c"];
        assert_eq!(played(&[(None, "ok a\n", FIRST), (Some(0), "", again)]).unwrap(), 0);
        assert_eq!(played(&[(None, "failed a\n", FIRST), (Some(0), "", again)]).unwrap(), FAILED);
    }

    #[test]
    fn host_that_dies_twice_under_one_test_is_a_failure() {
        let again: &[&str] = &["--nocapture", "--exact", "b", "c"];
        assert!(played(&[(None, "ignored: why a\n", FIRST), (None, "", again)]).is_err());
    }
}
