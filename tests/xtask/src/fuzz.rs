//! `cargo xtask fuzz`: runs every fuzz target for some time, under libFuzzer.
//!
//! It works with a stable compiler: flags of the compiler's back end enable coverage. New inputs
//! are kept in `target/fuzz`, with libFuzzer's output. Findings are printed at the end, each with
//! the command that repeats it.

use std::error::Error;
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use crate::{checkout, packages, progress, report};

/// The folder of kept inputs, with one folder for each target.
const CORPUS: &str = "tests/fuzz/corpus";
/// The number of lines of libFuzzer's output that are shown for a failed target.
const LINES: usize = 60;
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
        let log = scratch.join(format!("{}.log", target.display()));
        let output = File::create(&log)?;
        let status = Command::new(&program)
            .env("PVMM_FUZZ", &target)
            .arg(format!("-max_total_time={seconds}"))
            .args(["-max_len=1024", "-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1"])
            .args(["-verbosity=0", "-close_fd_mask=0"])
            .arg(prefix)
            .arg(&grown)
            .arg(Path::new(CORPUS).join(&target))
            .stdout(output.try_clone()?)
            .stderr(output)
            .status()?;
        if !status.success() {
            found.push(Finding { target, log, folder: findings });
        }
    }
    // Findings are printed last, so that no other output hides them.
    found.iter().for_each(|finding| finding.print(&program));
    Ok(if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A target that failed.
struct Finding {
    target: OsString,
    /// The output of libFuzzer.
    log: PathBuf,
    /// The folder of the inputs that failed.
    folder: PathBuf,
}

impl Finding {
    /// Prints the end of libFuzzer's output, the bytes of each input, and the command that repeats
    /// it.
    fn print(&self, program: &Path) {
        let log = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&log);
        let lines: Vec<_> = text.lines().filter(|line| !line.contains("NEW_FUNC")).collect();
        for line in &lines[lines.len().saturating_sub(LINES)..] {
            eprintln!("{line}");
        }
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let bytes = fs::read(entry.path()).unwrap_or_default();
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("fuzz: {}: {hex}", entry.path().display());
        }
        eprintln!(
            "fuzz: {} failed; its findings are in {}; repeat one with PVMM_FUZZ={} {} FILE",
            self.target.display(),
            self.folder.display(),
            self.target.display(),
            program.display()
        );
    }
}

/// Builds the targets with coverage, in a target folder of their own. Returns the path of the
/// program.
fn build(scratch: &Path) -> Result<PathBuf, Box<dyn Error>> {
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
