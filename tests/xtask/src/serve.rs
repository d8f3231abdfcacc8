//! `cargo xtask test-serve`: published clients, examples and many clients at once against
//! `pvmm serve`, with the templates that they need.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use crate::on_kvm::{self, NestedPlace};
use crate::probe::{self, Found};
use crate::{artifacts, cache, cargo, checkout, compat, kernel, packages, progress, report, site};

/// The packages that the clients need on this machine.
const PACKAGES: [&str; 5] = ["curl", "nodejs", "openssl", "python3", "python3-pip"];

/// The pages of the site whose blocks are run.
const PAGES: [&str; 5] = [
    "tutorial.html",
    "howto/pandastack.html",
    "howto/e2b.html",
    "howto/mcp.html",
    "howto/firecracker.html",
];

#[derive(Debug, clap::Args)]
pub struct Options {
    /// Many clients for ten minutes, and nothing else
    #[arg(long)]
    soak: bool,
    /// Begin with this program of tests/serve, as after a failure
    #[arg(long, value_name = "PROGRAM", conflicts_with = "soak")]
    from: Option<String>,
    /// Only examples with this in their names
    #[arg(conflicts_with = "from")]
    names: Vec<OsString>,
}

pub fn run(options: &Options) -> ExitCode {
    match test(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("test-serve: {}", report::chain(e.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn test(options: &Options) -> Result<(), Box<dyn Error>> {
    packages::install(&PACKAGES)?;
    cargo::run(&["build", "--release", "--package", "pvmm-launcher"])?;
    artifacts::prepare()?;
    if options.soak {
        return in_host("clients.py", &["50".into(), "600".into()]);
    }
    artifacts::prepare_built_in()?;
    let mut programs = Programs { from: options.from.as_deref() };
    if programs.reached("examples.py") {
        let node = install_node("examples/typescript/package.json", "node")?;
        let mut words = vec![node.into_os_string()];
        words.extend(options.names.iter().cloned());
        in_host("examples.py", &words)?;
    }
    if !options.names.is_empty() {
        return Ok(());
    }
    if programs.reached("pages.py") {
        // For the page about Firecracker, whose reader has a kernel that needs no initrd.
        kernel::ensure(false)?;
        let site = site::build()?;
        let pages = PAGES.map(|page| site.join("docs").join(page).into_os_string());
        in_host("pages.py", &pages)?;
    }
    for program in ["flows.py", "mcp_client.py", "e2b_flows.py", "previews.py"] {
        if programs.reached(program) {
            in_host(program, &[])?;
        }
    }
    for program in ["node_clients.py", "e2b_domain.py"] {
        if programs.reached(program) {
            in_host(program, &[install_npm()?.into_os_string()])?;
        }
    }
    if programs.reached("adapters.py") {
        in_host_with("adapters.py", install_adapters()?, &[])?;
    }
    if programs.reached("restart.py") {
        in_host("restart.py", &["45".into()])?;
    }
    if programs.reached("clients.py") {
        in_host("clients.py", &["8".into(), "60".into()])?;
    }
    if programs.reached("schema.py") {
        let api = checkout::root().join("docs/api.json").into_os_string();
        in_host("schema.py", &[api, "3".into()])?;
    }
    if programs.reached("create.py") {
        // In one command with the program, so that the common libraries are built once.
        let packages = ["pvmm-launcher", "pvmm-sandbox"].map(|name| ["--package", name]);
        let example = [packages.as_flattened(), &["--bins", "--example", "create"]].concat();
        cargo::run(&[&["build", "--release"], &example[..]].concat())?;
        let library = cargo::target_dir().join("release/examples/create").into_os_string();
        in_host("create.py", &[library, "40".into(), "1.3".into()])?;
    }
    if programs.reached("fork_memory.py") {
        in_host("fork_memory.py", &["500".into(), "10".into(), "70".into()])?;
    }
    match programs.from {
        Some(unknown) => Err(format!("no program of tests/serve is called {unknown}").into()),
        None => Ok(()),
    }
}

/// The programs that are left to run, in their order.
struct Programs<'a> {
    /// The first one to run, until it is reached.
    from: Option<&'a str>,
}

impl Programs<'_> {
    /// Returns whether `program`, the next one, is to run.
    fn reached(&mut self, program: &str) -> bool {
        self.from = self.from.filter(|from| *from != program);
        self.from.is_none()
    }
}

/// Installs the Python clients, unless they are there.
pub fn install_python() -> Result<PathBuf, Box<dyn Error>> {
    let place = cache::dir().join("serve/python");
    compat::install_python(&checkout::root().join("tests/serve/requirements.txt"), &place)?;
    Ok(place)
}

/// Installs a server with the API of S3, unless it is there.
pub fn install_store() -> Result<(), Box<dyn Error>> {
    let place = cache::dir().join("tools/seaweedfs");
    compat::install_python(&checkout::root().join("tests/serve/store.txt"), &place)
}

/// Installs the agent frameworks and their adapters, unless they are there. They need much more
/// than the clients, so they have a folder of their own.
fn install_adapters() -> Result<PathBuf, Box<dyn Error>> {
    let place = cache::dir().join("serve/adapters");
    compat::install_python(&checkout::root().join("tests/serve/adapters.txt"), &place)?;
    Ok(place)
}

/// Installs the clients from npm, unless they are there.
pub fn install_npm() -> Result<PathBuf, Box<dyn Error>> {
    install_node("tests/serve/node/package.json", "npm")
}

/// Runs the unit tests of the Python SDK, which need no guest.
pub fn test_sdk() -> Result<(), Box<dyn Error>> {
    let sdk = checkout::root().join("sdk/python");
    progress::step("unit tests of sdk/python");
    let mut python = Command::new("python3");
    python.args(["-m", "unittest", "discover", "--start-directory"]).arg(sdk.join("tests"));
    python.env("PYTHONPATH", std::env::join_paths([sdk.join("src"), install_python()?])?);
    compat::check(python.stdin(Stdio::null()), "unit tests of sdk/python")
}

/// Installs packages from npm into a folder of the cache, unless they are there.
fn install_node(list: &str, folder: &str) -> Result<PathBuf, Box<dyn Error>> {
    let place = cache::dir().join("serve").join(folder);
    let wanted = checkout::root().join(list);
    let there = place.join("package.json");
    if fs::read(&there).ok() != Some(fs::read(&wanted)?) || !place.join("node_modules").exists() {
        progress::step("npm install");
        fs::create_dir_all(&place)?;
        // Packages of Node.js from elsewhere bring npm along, and conflict with Debian's.
        if Command::new("npm").arg("--version").output().is_err() {
            packages::install(&["npm"])?;
        }
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--no-audit", "--no-fund"]).current_dir(&place);
        fs::copy(&wanted, &there)?;
        compat::check(npm.stdin(Stdio::null()), "npm install").inspect_err(|_| {
            let _ = fs::remove_dir_all(&place);
        })?;
    }
    Ok(place.join("node_modules"))
}

/// Runs a program of `tests/serve` where guests run.
fn in_host(program: &str, words: &[OsString]) -> Result<(), Box<dyn Error>> {
    in_host_with(program, install_python()?, words)
}

fn in_host_with(program: &str, clients: PathBuf, words: &[OsString]) -> Result<(), Box<dyn Error>> {
    let sdk = checkout::root().join("sdk/python/src");
    let packages = [clients, compat::install_schemathesis()?, sdk];
    let argv = self::program(program, &packages, words);
    progress::step(format!("serve: {program}"));
    let code = match probe::find() {
        Found::Here(_) => on_kvm::run_here(&argv),
        Found::NotHere(_) => on_kvm::code(NestedPlace::open().and_then(|place| place.run(&argv))),
    };
    if code == 0 { Ok(()) } else { Err(format!("{program} ended with {code}").into()) }
}

/// Returns the command line of a program of `tests/serve`, which finds its modules in `packages`.
pub fn program(name: &str, packages: &[PathBuf], words: &[OsString]) -> Vec<OsString> {
    let mut variable = OsString::from("PYTHONPATH=");
    for place in packages {
        variable.push(place);
        variable.push(":");
    }
    let mut argv: Vec<OsString> = vec!["env".into(), variable];
    // What is made here goes with the run.
    argv.extend(
        ["XDG_DATA_HOME=/tmp/pvmm-data", "PVMM_RUNTIME_DIR=/tmp/pvmm-serve"].map(Into::into),
    );
    argv.extend([
        "python3".into(),
        checkout::root().join("tests/serve").join(name).into_os_string(),
    ]);
    argv.push(cargo::target_dir().join("release/pvmm").into_os_string());
    argv.extend_from_slice(words);
    argv
}
