//! `cargo xtask test`: every test there is, on a machine that may have nothing but Rust.
//!
//! Unit tests run here; the suite of real guests is one program, carried to where KVM is and run
//! there once.

use std::error::Error;
use std::ffi::OsString;
use std::process::{Command, ExitCode, Stdio};

use crate::on_kvm::{self, Found, NestedPlace};
use crate::{artifacts, cargo, checkout, packages, progress, report};

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
    let arguments = ["--ignored".into(), "--nocapture".into(), filter];
    finish("soak", suite(&arguments))
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
    cargo::run(&["build", "--release", "--package", "pvmm-launcher"])?;
    let suite = cargo::build_test("pvmm-tests", "suite")?;

    build_kernel()?;
    let artifacts = artifacts::prepare()?;
    let stock = artifacts.with_debian_kernel()?;
    progress::step(format!("guest kernels: {}, {}", artifacts.kernel.label, stock.label));

    let mut argv = vec![suite.into_os_string()];
    argv.extend_from_slice(arguments);
    // One test at a time: each checks that it left nothing behind on the whole host.
    if !arguments.iter().any(|argument| argument.to_string_lossy().starts_with("--test-threads")) {
        argv.push("--test-threads=1".into());
    }
    std::env::set_current_dir(checkout::root())?;
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

/// In a process of its own, because it catches signals in its own way.
fn build_kernel() -> Result<(), Box<dyn Error>> {
    progress::step("cargo xtask kernel");
    let mut xtask = Command::new(checkout::program()?);
    if xtask.arg("kernel").stdout(Stdio::null()).status()?.success() {
        return Ok(());
    }
    Err("the guest kernel was not built".into())
}
