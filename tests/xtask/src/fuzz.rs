//! `cargo xtask fuzz`: every fuzz target for a while, under libFuzzer.
//!
//! Works with a stable compiler: coverage is asked for by flags of the compiler's back end. What is
//! found on the way is kept in `target/fuzz`, and a finding is printed with the command that
//! repeats it.

use std::error::Error;
use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::{env, fs};

use crate::{checkout, packages, progress, report};

/// The folder of kept inputs has one folder for each target.
const CORPUS: &str = "tests/fuzz/corpus";
const TARGET: &str = "x86_64-unknown-linux-gnu";
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    -Ccodegen-units=1 -Cdebug-assertions=on -Coverflow-checks=on";

/// Runs the targets whose names contain `filter`, each for `seconds`.
pub fn run(seconds: u32, filter: Option<&str>) -> ExitCode {
    match fuzz(seconds, filter.unwrap_or_default()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("fuzz: {}", report::chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn fuzz(seconds: u32, filter: &str) -> Result<ExitCode, Box<dyn Error>> {
    let root = checkout::root();
    env::set_current_dir(&root)?;
    let scratch = root.join("target/fuzz");
    // libFuzzer is C++.
    packages::install(&["g++"])?;
    let program = build(&scratch)?;
    let mut targets: Vec<_> = fs::read_dir(CORPUS)?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<std::io::Result<_>>()?;
    targets.sort();
    let mut found = Vec::new();
    for target in targets {
        if !target.to_string_lossy().contains(filter) {
            continue;
        }
        progress::step(format!("{} for {seconds} s", target.display()));
        let grown = scratch.join("corpus").join(&target);
        let findings = scratch.join("findings").join(&target);
        fs::create_dir_all(&grown)?;
        fs::create_dir_all(&findings)?;
        let mut prefix = OsString::from("-artifact_prefix=");
        prefix.push(&findings);
        prefix.push("/");
        let status = Command::new(&program)
            .env("PVMM_FUZZ", &target)
            .arg(format!("-max_total_time={seconds}"))
            .args(["-max_len=1024", "-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1"])
            .args(["-verbosity=0", "-close_fd_mask=0"])
            .arg(prefix)
            .arg(&grown)
            .arg(Path::new(CORPUS).join(&target))
            .status()?;
        if !status.success() {
            eprintln!(
                "fuzz: {} has a finding in {}; repeat it with PVMM_FUZZ={} {} FILE",
                target.display(),
                findings.display(),
                target.display(),
                program.display()
            );
            found.push(target);
        }
    }
    Ok(if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Builds the targets with coverage, apart from everything else that is built.
fn build(scratch: &Path) -> Result<std::path::PathBuf, Box<dyn Error>> {
    progress::step("building the fuzz targets");
    let built = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--release", "--package", "pvmm-fuzz", "--features", "libfuzzer"])
        .args(["--bin", "fuzz", "--target", TARGET, "--target-dir"])
        .arg(scratch)
        .env("RUSTFLAGS", COVERAGE)
        .status()?;
    if !built.success() {
        return Err("the fuzz targets were not built".into());
    }
    Ok(scratch.join(TARGET).join("release/fuzz"))
}
