//! `cargo xtask test`: every test there is, on a machine that may have nothing but Rust.
//!
//! Unit tests run here; the suite of real guests is one program, carried to where KVM is and run
//! there once.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use crate::on_kvm::{self, Found, NestedPlace};
use crate::{artifacts, cargo, checkout, packages, progress, report};

/// More failures than this are no accident, and the suite has failed.
const SECOND_CHANCES: usize = 3;

/// What the first leaves, the second reads after the nested host has booted again.
const FIRST_BOOT: &str = "reboot::first_boot_writes_a_snapshot";
const SECOND_BOOT: &str = "reboot::soak_snapshot_of_an_earlier_boot_goes_on";

/// The test whose guest has more than `base`.
const OF_SCIENCE: &str = "code::soak_figures_and_tables_of_real_packages_come_out";

/// What the unit tests need.
const PACKAGES: [&str; 1] = ["strace"];

/// Every test. `arguments` go to the suite.
pub fn run(arguments: &[OsString]) -> ExitCode {
    let test = || -> Result<u8, Box<dyn Error>> {
        packages::install(&PACKAGES)?;
        cargo::run(&["test", "--workspace", "--exclude", "pvmm-tests"])?;
        suite(arguments)
    };
    finish("test", test())
}

/// The suite's long tests, which `run` leaves out.
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
        suite(&["--ignored".into(), "--nocapture".into(), filter])
    };
    finish("soak", soak())
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
    let programs = ["--package", "pvmm-launcher", "--package", "pvmm-jailer"];
    cargo::run(&[&["build", "--release"], &programs[..]].concat())?;
    let suite = cargo::build_test("pvmm-tests", "suite")?;

    build_kernel()?;
    let artifacts = artifacts::prepare()?;
    let stock = artifacts.with_debian_kernel()?;
    progress::step(format!("guest kernels: {}, {}", artifacts.kernel.label, stock.label));

    std::env::set_current_dir(checkout::root())?;
    fs::create_dir_all(checkout::scratch())?;
    let log = checkout::scratch().join(format!("suite-{}", std::process::id()));
    let code = run_suite(&suite, arguments, &log)?;
    let failed = failures(&fs::read_to_string(&log).unwrap_or_default());
    let _ = fs::remove_file(&log);
    if code == 0 || failed.is_empty() || failed.len() > SECOND_CHANCES {
        return Ok(code);
    }
    // Emulated processors on a shared machine stall for seconds. Who fails alone as well is broken; who does
    // not is told of all the same.
    progress::step(format!("once more, by themselves: {}", failed.join(", ")));
    let mut again: Vec<OsString> = vec!["--exact".into(), "--nocapture".into()];
    again.extend(failed.iter().map(OsString::from));
    let code = run_suite(&suite, &again, &log)?;
    let _ = fs::remove_file(&log);
    if code == 0 {
        progress::step(format!("FLAKY, passed only the second time: {}", failed.join(", ")));
    }
    Ok(code)
}

/// Runs the suite's program, which writes the name of each test that ended to `log`.
fn run_suite(suite: &Path, arguments: &[OsString], log: &Path) -> Result<u8, Box<dyn Error>> {
    let mut argv = vec![suite.as_os_str().to_owned()];
    argv.extend_from_slice(arguments);
    argv.extend(["--logfile".into(), log.as_os_str().to_owned()]);
    // One test at a time: each checks that it left nothing behind on the whole host.
    if !arguments.iter().any(|argument| argument.to_string_lossy().starts_with("--test-threads")) {
        argv.push("--test-threads=1".into());
    }
    Ok(match on_kvm::find() {
        Found::Here(host) => {
            progress::step(format!("running the suite here, on {}", host.backend));
            on_kvm::run_here(&argv)
        }
        Found::NotHere(reason) => {
            progress::step(format!(
                "no usable KVM here ({reason}): the suite runs in a nested host"
            ));
            on_kvm::code(NestedPlace::open().and_then(|place| place.run(&argv)))
        }
    })
}

/// The tests that a log says have failed.
fn failures(log: &str) -> Vec<String> {
    log.lines().filter_map(|line| line.strip_prefix("failed ")).map(str::to_owned).collect()
}

/// In a process of its own, because it catches signals in its own way.
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

    #[test]
    fn failures_are_the_failed_lines_of_the_log() {
        let log = "ok boot::one\nfailed run::two\nignored soak::three\nfailed vsock::four\n";
        assert_eq!(failures(log), ["run::two", "vsock::four"]);
        assert!(failures("").is_empty());
    }
}
