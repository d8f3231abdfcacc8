//! `cargo xtask bench`: builds the benchmark and runs it where guests run.
//!
//! Samples, report and picture are written to `target/bench`, also if they were made in a nested
//! host.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::on_kvm::{self, NestedPlace};
use crate::probe::{self, Found};
use crate::{artifacts, cargo, checkout, firecracker, packages, progress, report};

#[derive(Debug, clap::Args)]
pub struct Options {
    /// Take few samples: minutes, not an hour, on an emulated processor
    #[arg(long)]
    quick: bool,
    /// Measure only what needs no guest, on this machine's own /dev/kvm
    #[arg(long)]
    native: bool,
    /// Leave out a mechanism, or several separated by commas, to measure what it is worth; `list`
    /// names them
    #[arg(long, value_name = "NAME")]
    without: Option<OsString>,
    /// Write the results to docs/benchmarks/HOST.md too, as those of this kind of host
    #[arg(long, value_name = "HOST")]
    publish: Option<String>,
    /// Arguments for the benchmark: names of moments, `--samples N`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

pub fn run(options: &Options) -> ExitCode {
    match bench(options) {
        Ok(0) => match options.publish.as_deref().map_or(Ok(()), |host| publish(options, host)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) => {
                eprintln!("bench: {}", report::chain(e.as_ref()));
                ExitCode::FAILURE
            }
        },
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("bench: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn bench(options: &Options) -> Result<u8, Box<dyn Error>> {
    let features: &[&str] = if options.without.is_some() { &["ablation"] } else { &[] };
    let program = cargo::ship_with("pvmm-benches", "pvmm-bench", features)?;
    let launcher = cargo::ship("pvmm-launcher", "pvmm")?;
    artifacts::prepare()?;
    packages::install(&["qemu-system-x86"])?;
    let verb = if options.native { "native" } else { "run" };
    let made = made()?;
    let command = |words: Vec<OsString>, out: &Path| {
        let mut argv = words;
        argv.extend([program.clone().into_os_string(), verb.into()]);
        argv.extend(options.quick.then(|| "--quick".into()));
        argv.extend(["--made".into(), made.clone().into()]);
        argv.extend(["--out".into(), out.as_os_str().to_owned()]);
        argv.extend(options.without.iter().flat_map(|name| ["--without".into(), name.clone()]));
        argv.extend_from_slice(&options.arguments);
        argv
    };
    std::env::set_current_dir(checkout::root())?;
    let kept = kept(options);
    if options.native {
        return Ok(on_kvm::run_here(&command(Vec::new(), &kept)));
    }
    let found = probe::find();
    // The path in FIRECRACKER_BIN is checked before anything runs.
    let mut words = firecracker::words(&found)?;
    let mut named = OsString::from("PVMM_BIN=");
    named.push(launcher);
    if words.is_empty() {
        words.push("env".into());
    }
    words.push(named);
    Ok(match found {
        Found::Here(what) => {
            progress::step(format!("measuring here: {what}"));
            on_kvm::run_here(&command(words, &kept))
        }
        Found::NotHere(reason) => {
            progress::step(format!(
                "no usable KVM here ({reason}): measuring in a nested host, where only ratios count"
            ));
            let shared = checkout::scratch().join("bench");
            fs::create_dir_all(&shared)?;
            let argv = command(words, &shared);
            let code = on_kvm::code(NestedPlace::open().and_then(|place| place.run(&argv)));
            fs::create_dir_all(&kept)?;
            for entry in fs::read_dir(&shared)?.collect::<Result<Vec<_>, _>>()? {
                fs::copy(entry.path(), kept.join(entry.file_name()))?;
            }
            fs::remove_dir_all(&shared)?;
            progress::step(format!("samples, report and picture are in {}", kept.display()));
            code
        }
    })
}

/// Returns where the samples, the report and the picture are kept.
fn kept(options: &Options) -> PathBuf {
    cargo::target_dir().join(if options.native { "bench-native" } else { "bench" })
}

/// Returns when and of which commit a run is.
fn made() -> Result<String, Box<dyn Error>> {
    let word = |program: &str, arguments: &[&str]| -> Result<String, Box<dyn Error>> {
        let output =
            Command::new(program).args(arguments).current_dir(checkout::root()).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let date = word("date", &["--utc", "+%F"])?;
    let commit = word("git", &["describe", "--always", "--dirty", "--exclude=*"])?;
    Ok(format!("{date}, commit {commit}"))
}

/// Copies the page and the picture of the last run to the documentation.
fn publish(options: &Options, host: &str) -> Result<(), Box<dyn Error>> {
    let (kept, docs) = (kept(options), checkout::root().join("docs/benchmarks"));
    fs::create_dir_all(&docs)?;
    let page = fs::read_to_string(kept.join("results.md"))?;
    fs::write(docs.join(format!("{host}.md")), page.replace("times.svg", &format!("{host}.svg")))?;
    fs::copy(kept.join("times.svg"), docs.join(format!("{host}.svg")))?;
    Ok(())
}
