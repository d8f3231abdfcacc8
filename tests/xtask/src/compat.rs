//! `cargo xtask compat`: published clients of Firecracker, unmodified, against pvmm in its place.
//!
//! The clients are downloaded and built here and kept between runs. What runs guests runs where KVM
//! is. The tests that fctools publishes take long, and run only on request.

use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::{env, fs, io};

use crate::{
    artifacts, cache, cargo, checkout, fctools, firecracker, on_kvm, packages, probe, progress,
    report,
};

/// The crate of the drivers, which is a workspace of its own.
pub const CRATE: &str = "tests/compat";
/// The test that compares pvmm with Firecracker.
const BESIDE: &str = "compat_beside";
/// The packages that the clients and their drivers need.
const PACKAGES: [&str; 3] = ["iproute2", "python3", "python3-pip"];
/// How many requests schemathesis generates for each operation.
const EXAMPLES: &str = "50";

#[derive(Debug, clap::Args)]
pub struct Options {
    /// Also run the tests that fctools publishes; all of them, or those with FILTER in their names
    #[arg(long, value_name = "FILTER", num_args = 0..=1, default_missing_value = "")]
    fctools: Option<String>,
    /// Run nothing else
    #[arg(long, requires = "fctools")]
    only: bool,
    /// Only send one script of requests to pvmm and to the Firecracker that FIRECRACKER_BIN names
    #[arg(long, conflicts_with = "fctools")]
    beside: bool,
}

pub fn run(options: &Options) -> ExitCode {
    let compat = || -> Result<u8, Box<dyn Error>> {
        let mut code = 0;
        packages::install(&PACKAGES)?;
        if options.beside {
            cargo::run(&cargo::BUILD_PVMM)?;
            let program = cargo::build_test("pvmm-tests", "suite")?;
            artifacts::prepare()?;
            return beside(&program);
        }
        if !options.only {
            cargo::run(&cargo::BUILD_PVMM)?;
            requests_of_every_kind()?;
            code = clients()?;
        }
        if let Some(filter) = &options.fctools {
            code = code.max(fctools::run(filter)?);
        }
        Ok(code)
    };
    match compat() {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("compat: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Runs the clients that have a driver, through the suite.
fn clients() -> Result<u8, Box<dyn Error>> {
    let program = cargo::build_test("pvmm-tests", "suite")?;
    build(&["--bin", "rs-sdk", "--bin", "firepilot"], None)?;
    let clients = cache::dir().join("compat/clients");
    fs::create_dir_all(&clients)?;
    for name in ["rs-sdk", "firepilot"] {
        replace(&target().join("debug").join(name), &clients.join(name))?;
    }
    let source = checkout::root().join(CRATE);
    replace(&source.join("python_api.py"), &clients.join("python_api.py"))?;
    install_python(&source.join("requirements.txt"), &clients.join("python"))?;
    artifacts::prepare()?;
    let place = format!("PVMM_COMPAT={}", clients.display());
    let arguments = ["--ignored", "--nocapture", "--test-threads=1", "compat_", "--skip", BESIDE];
    let mut argv = vec!["env".into(), place.into(), program.clone().into_os_string()];
    argv.extend(arguments.map(OsString::from));
    let code = on_kvm(&argv)?;
    Ok(code.max(beside(&program)?))
}

/// Runs one script against pvmm and against Firecracker, if `FIRECRACKER_BIN` names one.
fn beside(program: &Path) -> Result<u8, Box<dyn Error>> {
    let mut argv = firecracker::words(&probe::find())?;
    if argv.is_empty() {
        eprintln!("compat: LEFT OUT: pvmm beside Firecracker, for FIRECRACKER_BIN names none");
        return Ok(0);
    }
    argv.push(program.into());
    argv.extend(["--ignored", "--nocapture", "--test-threads=1", BESIDE].map(OsString::from));
    on_kvm(&argv)
}

/// Sends valid and invalid requests that schemathesis generates from the description of the API. No
/// guest is needed.
fn requests_of_every_kind() -> Result<(), Box<dyn Error>> {
    let source = checkout::root().join(CRATE);
    let place = install_schemathesis()?;
    // The copy is in a folder that every user can reach, under the name `firecracker`.
    let programs = env::temp_dir().join("pvmm-compat");
    fs::create_dir_all(&programs)?;
    let program = programs.join("firecracker");
    replace(&cargo::target_dir().join("release/pvmm"), &program)?;
    progress::step("schemathesis: docs/openapi.json");
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", place).arg(source.join("schemathesis_api.py")).arg(&program);
    let done =
        check(python.arg(checkout::root().join("docs/openapi.json")).arg(EXAMPLES), "schemathesis");
    fs::remove_dir_all(programs)?;
    done
}

/// Installs schemathesis, unless it is there.
pub fn install_schemathesis() -> Result<PathBuf, Box<dyn Error>> {
    let place = cache::dir().join("compat/schemathesis");
    let requirements = checkout::root().join(CRATE).join("requirements-schemathesis.txt");
    install_python(&requirements, &place)?;
    Ok(place)
}

/// Returns the folder in which the clients are built. It is in the cache, apart from the project's
/// own.
pub fn target() -> PathBuf {
    cache::dir().join("compat/target")
}

/// Builds programs of the crate of the drivers.
pub fn build(arguments: &[&str], flags: Option<&str>) -> Result<(), Box<dyn Error>> {
    progress::step(format!("cargo build in {CRATE}: {}", arguments.join(" ")));
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--locked"]).args(arguments).env("CARGO_TARGET_DIR", target());
    if let Some(flags) = flags {
        cargo.env("RUSTFLAGS", flags);
    }
    check(cargo.current_dir(checkout::root().join(CRATE)).stdin(Stdio::null()), "cargo build")
}

/// Installs Python packages into `place`, unless it has the required ones.
pub fn install_python(requirements: &Path, place: &Path) -> Result<(), Box<dyn Error>> {
    let (wanted, stamp) = (fs::read_to_string(requirements)?, place.join("requirements.txt"));
    if fs::read_to_string(&stamp).is_ok_and(|there| there == wanted) {
        return Ok(());
    }
    progress::step(format!("pip install {}", wanted.trim()));
    let _ = fs::remove_dir_all(place);
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--target"]).arg(place);
    check(pip.arg("--requirement").arg(requirements), "pip install")?;
    Ok(fs::write(stamp, wanted)?)
}

pub fn check(command: &mut Command, what: &str) -> Result<(), Box<dyn Error>> {
    let status = command.status()?;
    if status.success() { Ok(()) } else { Err(format!("{what} failed ({status})").into()) }
}

/// Copies a file to a path that may be in use.
pub fn replace(from: &Path, to: &Path) -> io::Result<()> {
    let new = to.with_extension("new");
    fs::copy(from, &new)?;
    fs::rename(new, to)
}

/// Runs a command where guests run, and returns its exit code.
pub fn on_kvm(argv: &[OsString]) -> Result<u8, Box<dyn Error>> {
    env::set_current_dir(checkout::root())?;
    Ok(match probe::find() {
        probe::Found::Here(_) => on_kvm::run_here(argv),
        probe::Found::NotHere(_) => {
            on_kvm::code(on_kvm::NestedPlace::open().and_then(|place| place.run(argv)))
        }
    })
}
